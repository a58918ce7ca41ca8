"""Drafts of several MTP modules after the hand-over equal a recompute of the whole text, drafts and KV, in every round.

Row D8: modules form a chain or do not. Also covered: kept hidden states, the first round after the hand-over, chunks
and prefix hits (a module's KV depends on later tokens), and retraction.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decode_node.speculative.drafters.mtp
import prefill_node.mtp
from common.engine.graphs.admission import Fallback
from common.engine.ops.keep_hidden import keep_hidden_triton
from common.engine.ops.triton_kernel import tl
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import combinations, every_value
from tests.fakes.mtp_models import (
    FORMATS,
    MODULES,
    NARROW,
    Seen,
    drafting,
    eager_rows,
    expect_eager,
    observed,
)
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import (
    SAMPLED,
    expect_accept_length,
    expect_conversation,
    expect_migration,
    expect_reference,
    expect_retraction,
    prompt_of,
)
from tests.fakes.tiny_model import VOCAB


def expect_all_eager(name: str, steps: int, seen: list[Seen], least: int) -> None:
    assert len(seen) >= least
    for each in seen:
        expect_eager(name, steps, each)


def shape_of(name: str, steps: int, seen: list[Seen], buckets: tuple[int, ...] = (), **rest: object) -> Shape:
    model, step = observed(name, steps, 0.7, seen, buckets)
    return replace(Shape(), draft=model, step=step, **rest)  # type: ignore[arg-type]


CUTS = [("mtp", *each) for each in combinations((1, 7, 64), (1, 16, 64), (Immediate, Deferred))]
CUTS += [("mtp-no-chain", chunk, 16, Deferred) for chunk in (1, 7)]


@pytest.mark.parametrize(("name", "chunk", "page_size", "completion"), CUTS)
def test_across_the_cut(name: str, chunk: int, page_size: int, completion: type[Completion]) -> None:
    """For any chunks and pages, the decode node continues as if nothing had been split."""
    seen: list[Seen] = []
    shape = shape_of(name, 3, seen, chunk_tokens=chunk, page_size=page_size, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 3, 16, 17, 33)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (4, 20)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        assert cluster.decode.link.counters.avg_spec_accept_length > 1.5
    expect_all_eager(name, 3, seen, least=14)


@pytest.mark.parametrize("name", NARROW)
def test_modules_of_another_width_than_the_target(name: str) -> None:
    """Row D10: chained modules pass their own width on, others the target's; the kept states have it too."""
    seen: list[Seen] = []
    with NodeCluster(shape_of(name, 3, seen, (1, 4), chunk_tokens=7, page_size=4)) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 3, 17, 33)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_all_eager(name, 3, seen, least=8)


@pytest.mark.parametrize("steps", [1, 2, 4, MODULES])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_modules(name: str, steps: int) -> None:
    """This includes prompts that are shorter than the chain of modules."""
    seen: list[Seen] = []
    with NodeCluster(shape_of(name, steps, seen, chunk_tokens=3)) as cluster:
        calls = [cluster.submit(prompt_of(n, n), 12) for n in (1, 1, 2, 3, 4, 5, 11, 30)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_all_eager(name, steps, seen, least=10)


@pytest.mark.parametrize(
    ("name", "page_size", "prefill_cache"),
    [("mtp", 1, True), ("mtp", 1, False), ("mtp", 4, True), ("mtp-no-chain", 4, True)],
)
def test_prefix_hits_at_every_boundary(name: str, page_size: int, prefill_cache: bool) -> None:
    """A hit must not give KV of a module that has read another continuation, however short the remainder is."""
    seen: list[Seen] = []
    shape = shape_of(
        name, 3, seen, page_size=page_size, prefill_cache=prefill_cache, chunk_tokens=5, prefill_batch=2
    )
    with NodeCluster(shape) as cluster:
        first = prompt_of(13)
        for shared in range(len(first) + 1):
            second = first[:shared] + [(token + 1) % VOCAB for token in first[shared:]]
            calls = [cluster.submit(second + extra, 4) for extra in ([], [5, 6, 7])]
            cluster.run()
            expect_reference(*calls)
        expect_conversation(cluster, first)
        cluster.settle()
        assert cluster.decode.link.counters.cached_tokens > 0
    expect_all_eager(name, 3, seen, least=30)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_no_page_leaves_before_its_kv_is_right(chunk: int) -> None:
    """Chunks end just before the prompt does, when the last modules have not read the drawn token.

    The decode node does not compute those rows again.
    """
    seen: list[Seen] = []
    with NodeCluster(shape_of("mtp", MODULES, seen, page_size=1, chunk_tokens=chunk)) as cluster:
        calls = [cluster.submit(prompt_of(n, 1), 4) for n in range(6, 13)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_all_eager("mtp", MODULES, seen, least=7)


@pytest.mark.parametrize(("completion", "page_size"), every_value((Deferred, Immediate), (1, 16)))
def test_retraction_keeps_draft_state_and_draft_kv(completion: type[Completion], page_size: int) -> None:
    """The relay row and the KV planes of all modules are restored."""
    seen: list[Seen] = []
    shape = shape_of(
        "mtp",
        3,
        seen,
        page_size=page_size,
        decode_pool=96,
        reserved_tokens=4,
        completion=completion,
        max_running=4,
    )
    expect_retraction(shape)
    expect_all_eager("mtp", 3, seen, least=40)


def test_migration_rebuilds_the_draft_state() -> None:
    for k in (1, 3, 6):
        seen: list[Seen] = []
        expect_migration(shape_of("mtp", 3, seen, page_size=4, decodes=2), k)
        expect_all_eager("mtp", 3, seen, least=4)


@pytest.mark.parametrize(("name", "completion"), every_value(tuple(FORMATS), (Deferred, Immediate)))
def test_accept_length_equals_the_uninterrupted_reference(name: str, completion: type[Completion]) -> None:
    """There are as many rounds and accepted drafts as a walk over the finished text counts."""
    steps = 3
    model, step = drafting(name, steps)
    shape = Shape(draft=model, step=step, completion=completion)
    expect_accept_length(shape, steps, lambda text: eager_rows(name, steps, tuple(text))[0])


@pytest.mark.parametrize(
    ("drafter", "buckets"),
    every_value((("mtp", Deferred), ("mtp", Immediate), ("mtp-no-chain", Deferred)), ((1, 2, 4), (8,))),
)
def test_graphs_draft_what_eager_steps_draft(
    drafter: tuple[str, type[Completion]], buckets: tuple[int, ...]
) -> None:
    """One run has batches above, at and below the largest captured one.

    What is kept for the next round comes from whatever computed it, a replay or an eager step.
    """
    seen: list[Seen] = []
    name, completion = drafter
    shape = shape_of(name, 3, seen, buckets, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [
            cluster.submit(prompt_of(n, 2), 6 + 9 * index) for index, n in enumerate((1, 2, 5, 17, 30, 9))
        ]
        cluster.run()
        expect_reference(*calls)
        phases = {each.forward.graphs.spec.phase: each.forward.graphs for each in cluster.decode.steps.graphs}
        extend = phases["draft_extend"]
        assert extend.counters.replays.total() > 8
        above = extend.counters.fallbacks
        assert set(above) == ({Fallback.TOO_LARGE} if max(buckets) < 6 else set())
        cluster.settle()
    expect_all_eager(name, 3, seen, least=20)


@pytest.mark.skipif(tl is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_both_nodes_write_the_pool_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes' arguments are those that the kernel launcher requires, and the kernel equals its reference."""
    for module in (decode_node.speculative.drafters.mtp, prefill_node.mtp):
        monkeypatch.setattr(module, "keep_hidden", keep_hidden_triton)
    seen: list[Seen] = []
    with NodeCluster(shape_of("mtp", 3, seen, chunk_tokens=7)) as cluster:
        calls = [cluster.submit(prompt_of(n, 3), 9) for n in (1, 2, 17)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_all_eager("mtp", 3, seen, least=5)
