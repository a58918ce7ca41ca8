"""A page passed to the sender is never written again, whatever the draft and however slowly the sender reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from prefill_node.graphs import prompt_graphs
from tests.fakes import draft_models, drafters, mtp_models
from tests.fakes.covering import pairs
from tests.fakes.marking_sender import slow
from tests.fakes.node_cluster import MakeStep, NoDraftModel, Shape, Watched, autoregressive
from tests.fakes.scenarios import expect_reference, prompt_of

Drafting = Callable[[], tuple[NoDraftModel, MakeStep]]
DRAFTERS: dict[str, Drafting] = {
    "none": lambda: (NoDraftModel(), autoregressive),
    "ngram": lambda: (NoDraftModel(), drafters.ngram(3)),
    "eagle": lambda: draft_models.drafting("eagle", 3),
    "eagle3": lambda: draft_models.drafting("eagle3", 3),
    "eagle3-tree": lambda: draft_models.branching("eagle3", 3, 2, 6),
    "standalone": lambda: draft_models.drafting("standalone", 3),
    "mtp-1": lambda: mtp_models.drafting("mtp", 1),
    "mtp": lambda: mtp_models.drafting("mtp", 3),
    "mtp-5": lambda: mtp_models.drafting("mtp", 5),
    "mtp-no-chain": lambda: mtp_models.drafting("mtp-no-chain", 3),
}


@pytest.mark.parametrize(
    ("name", "completion", "layers"), pairs(tuple(DRAFTERS), (Immediate, Deferred, Watched), (False, True))
)
def test_no_forward_writes_what_the_sender_reads(
    name: str, completion: type[Completion], layers: bool
) -> None:
    """Pages and chunks are small, so every chunk ends among rows that the next one may compute again."""
    draft, step = DRAFTERS[name]()
    shape = Shape(page_size=2, chunk_tokens=5, draft=draft, step=step, completion=completion, layers=layers)
    if layers:
        shape = replace(shape, prompt_graphs="none")
    with slow(shape) as cluster:
        calls = [
            cluster.submit(prompt, 6, legs="d") for prompt in (prompt_of(23), prompt_of(12), prompt_of(3))
        ]
        cluster.turn(4)
        for call in calls:
            cluster.send_leg(call, "p")
        cluster.run(until=lambda: all(call.output for call in calls))
        cluster.turn(3)
        assert cluster.endpoint.pages_held == 12 + 6 + 2
        cluster.land()
        cluster.run()
        expect_reference(*calls)
        assert not cluster.failures
        cluster.settle()


@pytest.mark.parametrize("name", DRAFTERS)
def test_pages_of_the_prefix_cache_are_not_written_while_another_request_s_sender_reads_them(
    name: str,
) -> None:
    """The second prompt sends cached pages and continues after them; it is split at every place around a page's end."""
    draft, step = DRAFTERS[name]()
    shape = Shape(page_size=4, chunk_tokens=5, draft=draft, step=step, completion=Watched, decode_cache=False)
    with slow(shape) as cluster:
        cluster.land()
        first = cluster.submit(prompt_of(30), 2)
        cluster.run()
        cluster.hold()
        calls = [cluster.submit(first.prompt[:cut] + prompt_of(11, cut), 2) for cut in range(15, 20)]
        cluster.run(until=lambda: all(call.output for call in calls))
        cluster.turn(3)
        assert all(call.cached_tokens for call in calls)
        cluster.land()
        cluster.run()
        expect_reference(first, *calls)
        assert not cluster.failures
        cluster.settle()


@pytest.mark.parametrize("name", DRAFTERS)
def test_pages_that_ended_requests_leave_are_not_reused_while_the_sender_reads_them(name: str) -> None:
    """The pool fits two prompts: the third waits for pages that the writes of an aborted one still read."""
    draft, step = DRAFTERS[name]()
    shape = Shape(
        page_size=2, chunk_tokens=5, prefill_pool=48, draft=draft, step=step, completion=Watched, max_len=24
    )
    with slow(shape) as cluster:
        gone, stays = cluster.submit(prompt_of(20), 3), cluster.submit(prompt_of(19), 3)
        cluster.run(until=lambda: bool(stays.output))
        cluster.turn(3)
        cluster.abort(gone)
        late = cluster.submit(prompt_of(21), 3)
        cluster.turn(20)
        assert not late.output
        cluster.land()
        cluster.run()
        expect_reference(stays, late)
        assert not [each for each in cluster.failures if each.room == stays.room]
        cluster.settle()


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
@pytest.mark.parametrize("graphs", ["breakable", "piecewise"])
def test_graphs_of_prompts_write_no_more_than_their_rows(
    name: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned padding may point to any page except those being read, with and without breaks."""
    draft, step = DRAFTERS[name]()
    for unbroken in (4, 512):
        monkeypatch.setattr(prompt_graphs, "UNBROKEN_TOKENS", unbroken)
        shape = Shape(page_size=2, chunk_tokens=7, draft=draft, step=step, prompt_graphs=graphs)
        with slow(shape) as cluster:
            calls = [cluster.submit(prompt_of(17, seed), 4) for seed in range(3)]
            cluster.run(until=lambda: all(call.output for call in calls))  # noqa: B023
            assert cluster.prefill.link.counters.graphs[0].replays
            cluster.land()
            cluster.run()
            expect_reference(*calls)
            assert not cluster.failures
            cluster.settle()
