"""Steps for forced tokens beside the rounds of draft models: the reference's text, and exact drafts afterwards.

Such a step has no draft phase, and its draft-extend covers a wider window. If it left a wrong state, verification would
still be exact, so every later draft is compared with a recompute of the whole text.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes import draft_models, mtp_models
from tests.fakes.drafters import chaining
from tests.fakes.node_cluster import Call, MakeStep, NodeCluster, NoDraftModel, Shape
from tests.fakes.sampling_cases import EVERYTHING
from tests.fakes.scenarios import SAMPLED, expect_reference, lose_decode, prompt_of
from tests.fakes.tiny_grammar import EOS, GRAMMARS, tiny_compiler

STEPS, WIDTH = 3, 15
HEADS = ("eagle3", "eagle", "mtp-one-module", "standalone")
Seen = list[tuple[list[int], list[int]]]


def chained(made: tuple[NoDraftModel, MakeStep], buckets: tuple[int, ...] = (2, 4), **rest: Any) -> Shape:
    model, step = made
    config = getattr(model, "config")  # noqa: B009 - each kind of draft model has another type
    forced = chaining(step, model.algorithm, config, STEPS, WIDTH, buckets)
    return Shape(draft=model, step=forced, page_size=4, grammars=tiny_compiler(), **rest)


def submit(cluster: NodeCluster, name: str, length: int, **more: Any) -> Call:
    return cluster.submit(prompt_of(length), 60, grammar=GRAMMARS[name], **more)


def run_mixed(shape: Shape) -> None:
    """Run constrained and free requests in one batch, and expect steps of both kinds."""
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, "record", 9), submit(cluster, "record", 17, seed=5, temperature=1.3)]
        calls += [submit(cluster, "words", 12), cluster.submit(prompt_of(9), 30)]
        calls.append(cluster.submit(prompt_of(2), 30, seed=3, **SAMPLED))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters, graphs = (
            cluster.decode.link.counters,
            [each.forward.graphs for each in cluster.decode.steps.graphs],
        )
        verified = {
            each.spec.tokens_per_request: each.counters.replays.total() + each.counters.fallbacks.total()
            for each in graphs
            if each.spec.phase == "verify"
        }
    assert verified[WIDTH + 1] > 2
    assert sum(verified.values()) == counters.steps
    assert counters.spec_accepted_forced > 20


@pytest.mark.parametrize(
    ("name", "completion"), list(zip(HEADS, (Immediate, Deferred, Deferred, Immediate), strict=True))
)
def test_drafts_after_forced_tokens(name: str, completion: type[Completion]) -> None:
    seen: Seen = []
    made = draft_models.observed(name, STEPS, 0.7, seen, (2, 3))
    run_mixed(chained(made, completion=completion))
    assert len(seen) > 20
    for text, drafts in seen:
        assert drafts == draft_models.eager_drafts(name, text, STEPS)[: len(drafts)], (
            f"after {len(text)} tokens"
        )


@pytest.mark.parametrize("name", mtp_models.FORMATS)
def test_modules_after_forced_tokens(name: str) -> None:
    """The states that later modules open their windows with come from the wide window, too."""
    seen: list[mtp_models.Seen] = []
    run_mixed(chained(mtp_models.observed(name, STEPS, 0.7, seen, (3,)), completion=Deferred))
    assert len(seen) > 20
    for each in seen:
        mtp_models.expect_eager(name, STEPS, each)


def test_trees_after_forced_tokens() -> None:
    """A chain of forced tokens takes the place of the tree; the next tree begins with its end."""
    seen: draft_models.Trees = []
    run_mixed(chained(draft_models.branching("eagle3", STEPS, 4, 8, seen, (2, 4))))
    assert len(seen) > 20
    for text, paths in seen:
        assert draft_models.eager_branches("eagle3", text, [], 1)[0][1] in {path[0] for path in paths}


@pytest.mark.parametrize("name", ["eagle3", "standalone"])
def test_with_every_other_parameter(name: str) -> None:
    with NodeCluster(chained(draft_models.drafting(name, STEPS), max_running=5)) as cluster:
        stops = {**EVERYTHING, "stop_token_ids": (EOS, 21)}
        calls = [submit(cluster, grammar, 9, **stops) for grammar in GRAMMARS]
        calls.append(submit(cluster, "record", 12, seed=6, logprobs=2, **SAMPLED))
        calls.append(cluster.submit(prompt_of(9), 30, min_tokens=12, logprobs=1, stop_token_ids=(1, 2)))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.spec_accepted_forced > 10
        cluster.settle()


@pytest.mark.parametrize("name", ["eagle3", "standalone"])
def test_retraction_between_forced_tokens(name: str) -> None:
    made = draft_models.drafting(name, STEPS)
    with NodeCluster(chained(made, decode_pool=128, reserved_tokens=4, max_running=4)) as cluster:
        calls = [submit(cluster, "record", 11 + n, seed=n, **SAMPLED) for n in range(4)]
        calls.append(cluster.submit(prompt_of(12), 40))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        assert cluster.decode.link.counters.spec_accepted_forced > 0
        cluster.settle()


def test_another_node_continues_in_the_grammar() -> None:
    shape = chained(draft_models.drafting("eagle3", STEPS), decodes=2)
    with NodeCluster(shape) as cluster:
        call = submit(cluster, "record", 17, seed=5, temperature=1.3)
        cluster.run(until=lambda: len(call.output) >= 6)
        lose_decode(cluster, call)
