"""Draft models across the hand-over: plain decoding's tokens, and drafts that equal a recompute of the whole text.

Verification is exact, so a broken draft path changes only the drafts: every one is compared. Covered are widths,
the first verify after the hand-over, chunks, prefix hits, bigram keys and retraction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from prefill_node.request import PrefillRequest
from tests.fakes.covering import every_value, pairs
from tests.fakes.draft_models import DraftModel, Watched, drafter, drafting, eager_drafts, observed
from tests.fakes.drafters import speculative
from tests.fakes.late_lane import LateLane
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

NAMES = ("eagle3", "eagle3-full-vocabulary", "eagle", "mtp-one-module", "standalone")
Seen = list[tuple[list[int], list[int]]]


def expect_eager(name: str, seen: Seen, steps: int, least: int) -> None:
    assert len(seen) >= least
    for text, drafts in seen:
        assert drafts == eager_drafts(name, text, steps)[: len(drafts)], f"after {len(text)} tokens"


def shape_of(name: str, steps: int, seen: Seen, **rest: object) -> Shape:
    model, step = observed(name, steps, 0.7, seen)
    return replace(Shape(), draft=model, step=step, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "chunk", "page_size", "completion"),
    pairs(NAMES, (1, 7, 64), (1, 16, 64), (Immediate, Deferred)),
)
def test_drafts_across_the_cut(name: str, chunk: int, page_size: int, completion: type[Completion]) -> None:
    seen: Seen = []
    shape = shape_of(name, 3, seen, chunk_tokens=chunk, page_size=page_size, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 16, 17, 65)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (3, 20)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        assert cluster.decode.link.counters.avg_spec_accept_length > 1.5
    expect_eager(name, seen, 3, least=14)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp-one-module"])
def test_draft_kv_of_chunks_is_that_of_the_whole_prompt(name: str) -> None:
    """Row C1: compare keys and values of every position, as the decode node finds them before its first round."""
    prompt, planes = prompt_of(23), []

    class Look(Watched):
        def watch(self, index: int, text: list[int], rest: list[int]) -> None:
            if len(text) == len(prompt) + 1:
                planes.append(self.draft_kv(index, len(prompt)))

    for chunk in (64, 1, 22, 23, 7):  # the whole prompt first
        model = DraftModel(name)
        step = speculative(lambda bench, model=model: Look(drafter(model, bench, 2), bench))  # type: ignore[misc]
        with NodeCluster(Shape(draft=model, step=step, page_size=4, chunk_tokens=chunk)) as cluster:
            cluster.submit(prompt, 6)
            cluster.run()
    whole, *others = planes
    assert len(others) == 4
    for found in others:
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
@pytest.mark.parametrize("name", ["eagle3-narrow", "eagle3-no-aux", "eagle3-window"])
def test_heads_of_other_forms_across_the_cut(name: str, completion: type[Completion]) -> None:
    """Rows D1-D4: another width than the target's, more layers, no aux states, norms, an own embedding, or a window."""
    seen: Seen = []
    with NodeCluster(shape_of(name, 3, seen, chunk_tokens=7, page_size=4, completion=completion)) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 17, 40)]
        calls.append(cluster.submit(prompt_of(20), 9, seed=2, **SAMPLED))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        assert cluster.decode.link.counters.avg_spec_accept_length > 1.5
    expect_eager(name, seen, 3, least=8)


@pytest.mark.parametrize(("chunk", "completion"), [(1, Deferred), (7, Immediate), (64, Deferred)])
def test_a_standalone_model_of_another_width_across_the_cut(chunk: int, completion: type[Completion]) -> None:
    """Row D10: width, heads and layers differ from the target's; both models' planes share the pages."""
    seen: Seen = []
    name = "standalone-narrow"
    shape = shape_of(name, 3, seen, chunk_tokens=chunk, page_size=4, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 17, 40)]
        calls.append(cluster.submit(prompt_of(20), 9, seed=2, **SAMPLED))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_eager(name, seen, 3, least=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_hidden_dtype": "float16"},
        {"draft_topk_ids": (VOCAB,)},
        {"draft_topk_probs": (), "draft_topk_ids": ()},
    ],
    ids=["dtype", "id", "none"],
)
def test_a_draft_state_of_another_form_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row D2: as many bytes of another dtype would be accepted silently and only lower the accept length."""
    record = PrefillRequest.record
    monkeypatch.setattr(
        PrefillRequest, "record", lambda request, dtype: structs.replace(record(request, dtype), **wrong)
    )
    with NodeCluster(shape_of("eagle3", 3, []), resubmit=False) as cluster:
        call = cluster.submit(prompt_of(9), 6)
        cluster.run()
        assert call.error is not None
        assert "draft state" in call.error.message
        cluster.settle()


@pytest.mark.parametrize(
    ("name", "steps"), [*every_value(NAMES, (1, 2, 5, 7)), *every_value(NAMES, (7, 5, 1, 2))]
)
def test_every_number_of_steps(name: str, steps: int) -> None:
    seen: Seen = []
    with NodeCluster(shape_of(name, steps, seen)) as cluster:
        calls = [cluster.submit(prompt_of(n), n) for n in (2, 3, 11, 30)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    expect_eager(name, seen, steps, least=5)


@pytest.mark.parametrize(
    ("name", "page_size", "prefill_cache"),
    [
        *((("eagle3", size, cached)) for size in (1, 4) for cached in (True, False)),
        ("mtp-one-module", 4, True),
    ],
)
def test_prefix_hits_at_every_boundary(name: str, page_size: int, prefill_cache: bool) -> None:
    """A draft's KV of a position also depends on the next token: a hit must not give KV of another successor."""
    seen: Seen = []
    with NodeCluster(shape_of(name, 2, seen, page_size=page_size, prefill_cache=prefill_cache)) as cluster:
        first = prompt_of(13)
        for shared in range(len(first) + 1):
            second = first[:shared] + [(token + 1) % VOCAB for token in first[shared:]]
            for extra in ([], [5, 6, 7]):
                call = cluster.submit(second + extra, 4)
                cluster.run()
                expect_reference(call)
        expect_conversation(cluster, first)
        cluster.settle()
        assert cluster.decode.link.counters.cached_tokens > 0
    expect_eager(name, seen, 2, least=30)


@pytest.mark.parametrize(
    ("name", "completion", "page_size"),
    pairs(("eagle3", "mtp-one-module", "standalone"), (Immediate, Deferred), (1, 4, 16)),
)
def test_retraction_keeps_draft_state_and_draft_kv(
    name: str, completion: type[Completion], page_size: int
) -> None:
    seen: Seen = []
    shape = shape_of(
        name,
        3,
        seen,
        page_size=page_size,
        decode_pool=96,
        reserved_tokens=4,
        completion=completion,
        max_running=4,
    )
    expect_retraction(shape)
    expect_eager(name, seen, 3, least=40)


def test_draft_state_is_right_after_a_save_that_takes_several_turns() -> None:
    seen: Seen = []
    lane = LateLane(asks=4)
    shape = shape_of(
        "eagle3", 3, seen, page_size=4, decode_pool=96, reserved_tokens=4, max_running=4, lane=lane
    )
    expect_retraction(shape)
    assert lane.copies
    expect_eager("eagle3", seen, 3, least=40)


@pytest.mark.parametrize("name", ["eagle3", "mtp-one-module"])
def test_migration_rebuilds_the_draft_state(name: str) -> None:
    for k in (1, 3, 6):
        seen: Seen = []
        expect_migration(shape_of(name, 2, seen, page_size=4, decodes=2), k)
        expect_eager(name, seen, 2, least=4)


@pytest.mark.parametrize(("name", "completion"), every_value(NAMES, (Deferred, Immediate)))
def test_accept_length_equals_the_uninterrupted_reference(name: str, completion: type[Completion]) -> None:
    """The head's own drafts take as many rounds and accepted drafts as a walk over the finished text counts."""
    steps = 3
    model, step = drafting(name, steps)
    shape = Shape(draft=model, step=step, completion=completion)
    expect_accept_length(shape, steps, lambda text: eager_drafts(name, text, steps))
