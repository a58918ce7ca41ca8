"""`decode.graphs: full` with every drafter, through both nodes: plain decoding's tokens, and graphs that really ran."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.messages.identity import GraphTotals
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.draft_models import branching, drafting
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import MakeStep, NodeCluster, NoDraftModel, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, expect_retraction, prompt_of

BUCKETS = (1, 3)  # batches have up to 8 requests: those above 3 run eagerly
CASES: dict[str, tuple[NoDraftModel, MakeStep]] = {
    "ngram": (NoDraftModel(), ngram(3, BUCKETS)),
    "standalone": drafting("standalone", 3, BUCKETS),
    "eagle": drafting("eagle", 2, BUCKETS),
    "eagle3": drafting("eagle3", 3, BUCKETS),
    "eagle3-tree": branching("eagle3", 3, 2, 6, buckets=BUCKETS),
}
PHASES = {
    "ngram": {"verify"},
    "standalone": {"draft", "verify"},
    "eagle": {"draft", "verify", "draft_extend"},
    "eagle3": {"draft", "verify", "draft_extend"},
    "eagle3-tree": {"draft", "verify", "draft_extend"},
}


def totals(cluster: NodeCluster) -> Sequence[GraphTotals]:
    return [phase.forward.graphs.totals() for phase in cluster.decode.steps.graphs]


@pytest.mark.parametrize("completion", [Immediate, Deferred])
@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_plain_decoding(name: str, completion: type[Completion]) -> None:
    """Rows E4, A11: batches grow beyond the captured maximum and shrink again, with a logprob request in between."""
    model, step = CASES[name]
    shape = Shape(draft=model, step=step, page_size=4, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 6 + 3 * n) for n in (1, 2, 5, 7)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (3, 20)]
        calls += [cluster.submit(prompt_of(30), 8, logprobs=2)]
        cluster.run()
        expect_reference(*calls)
        assert all(token.logprob is not None for token in calls[-1].output)
        late = cluster.submit(prompt_of(7), 27)  # a repetition: n-grams know the answer by now
        cluster.run()
        expect_reference(late)
        cluster.settle()
        counters = cluster.decode.link.counters
        assert counters.avg_spec_accept_length > 1.0
        assert sum(counters.spec_accepted_at) == counters.spec_accepted_tokens > 0
        assert sorted(counters.spec_accepted_at, reverse=True) == list(counters.spec_accepted_at)
        assert set(counters.phase_seconds) == {"draft", "verify", "draft_extend"}
        assert all(seconds > 0 for seconds in counters.phase_seconds.values())
        assert {each.phase for each in totals(cluster)} == PHASES[name]
        for each in totals(cluster):
            assert each.replays > 0, "captured and never replayed"
            assert set(each.fallbacks) == {"too_large"}


@pytest.mark.parametrize("name", ["ngram", "eagle3", "eagle3-tree"])
def test_retracted_requests_resume_with_the_same_tokens(name: str) -> None:
    """Under graphs, pages and draft state leave the device and return to other pages and rows."""
    model, step = CASES[name]
    shape = Shape(
        draft=model,
        step=step,
        page_size=4,
        decode_pool=96,
        reserved_tokens=4,
        completion=Deferred,
        max_running=4,
    )
    expect_retraction(shape, greedy=2)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-tree", "ngram"])
def test_graphs_accept_what_eager_rounds_accept(name: str) -> None:
    """Rows E2, E4: not only tokens but drafts agree: the accept length is the same to the last accepted draft."""
    made = {
        "eagle3": lambda buckets: drafting("eagle3", 3, buckets),
        "eagle3-tree": lambda buckets: branching("eagle3", 3, 8, 24, buckets=buckets),
        "ngram": lambda buckets: (NoDraftModel(), ngram(3, buckets)),
    }[name]
    counted = []
    for buckets in ((), (1, 3), (8,)):
        model, step = made(buckets)
        with NodeCluster(Shape(draft=model, step=step)) as cluster:
            for _ in range(2):  # twice: n-grams know the answers by then
                calls = [cluster.submit(prompt_of(n), 24) for n in (5, 9, 19, 33)]
                cluster.run()
                expect_reference(*calls)
            cluster.settle()
            counters = cluster.decode.link.counters
            counted.append((counters.spec_drafts, counters.spec_draft_tokens, counters.spec_accepted_tokens))
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][2] > 0


def test_drafts_do_not_depend_on_what_prompts_ran_under() -> None:
    """Rows B5, B7: a piecewise target with a breakable draft gives tokens and accept length of eager prompts."""
    counted = {}
    for graphs in ("none", "breakable", "piecewise"):
        model, step = drafting("eagle3", 3, ())
        with NodeCluster(Shape(draft=model, step=step, prompt_graphs=graphs)) as cluster:
            calls = [cluster.submit(prompt_of(n), 16) for n in (5, 9, 19, 33)]
            cluster.run()
            expect_reference(*calls)
            cluster.settle()
            totals = cluster.prefill.link.counters.graphs
            assert [each.model for each in totals] == ["target", "draft"]
            assert [each.replays > 0 for each in totals] == [graphs != "none"] * 2
            counters = cluster.decode.link.counters
            counted[graphs] = (counters.spec_drafts, counters.spec_accepted_tokens, counters.spec_accepted_at)
    assert counted["none"] == counted["breakable"] == counted["piecewise"]
    assert counted["none"][1] > 0
