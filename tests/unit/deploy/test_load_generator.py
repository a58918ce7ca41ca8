"""deploy/load_generator: plans, prompts, percentiles and goodput, without a server."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from itertools import pairwise

import aiohttp
import pytest

from common.errors import ConfigError
from deploy.load_generator import measurement, runs
from deploy.load_generator.loads import closed_load, open_load
from deploy.load_generator.measurement import Bodies, Measurement, Target, turns
from deploy.load_generator.plan import (
    PlannedRequest,
    PromptShape,
    PromptTokens,
    Replay,
    Segment,
    closed_plan,
    poisson_plan,
    trace_plan,
)
from deploy.load_generator.runs import Run, Server, no_collections
from deploy.load_generator.stream import RequestTimes
from deploy.load_generator.summary import Limits, curve, doubts, percentile, summarise
from deploy.load_generator.trace import TraceRequest
from deploy.sse import EventSplitter

SHAPE = PromptShape(100, 10)
TOKENS = PromptTokens(99000, 5, (0, 1))


# -- plans -------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_spread_of_poisson() -> None:
    plan = poisson_plan(50, 200, SHAPE, seed=3)
    assert abs(len(plan) - 10_000) < 400  # four standard deviations
    assert all(0 < each.due < 200 for each in plan)
    gaps = [b.due - a.due for a, b in pairwise(plan)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert min(gaps) >= 0
    assert 0.9 < deviation / mean < 1.1  # 1 for exponential gaps


def test_a_seed_makes_the_same_plan_and_another_one_does_not() -> None:
    assert poisson_plan(5, 20, SHAPE, 1) == poisson_plan(5, 20, SHAPE, 1)
    assert poisson_plan(5, 20, SHAPE, 1) != poisson_plan(5, 20, SHAPE, 2)


def test_every_prompt_is_new_without_prefixes() -> None:
    plan = closed_plan(20, SHAPE, 1)
    prompts = {tuple(TOKENS.of(each)) for each in plan}
    assert len(prompts) == 20
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({prompt[:2] for prompt in prompts}) > 15


def test_prompts_of_a_group_share_its_prefix_and_nothing_more() -> None:
    plan = closed_plan(60, PromptShape(100, 10, groups=3, prefix=40), 1)
    prompts = [tuple(TOKENS.of(each)) for each in plan]
    assert len({prompt[:40] for prompt in prompts}) == 3
    assert len({prompt[40:] for prompt in prompts}) == 60
    assert all(each.input == 100 for each in plan)


@pytest.mark.parametrize("prefix", [0, 100])
def test_a_prefix_must_leave_a_token(prefix: int) -> None:
    with pytest.raises(
        ConfigError, match=f"prefix of {prefix} tokens must be shorter than the prompt of 100"
    ):
        PromptShape(100, 10, groups=1, prefix=prefix)


def test_runs_of_a_measurement_share_no_prompt() -> None:
    [request] = closed_plan(1, SHAPE, 1)
    variants = [PromptTokens(99000, *at) for at in ((5, (0, 1)), (6, (0, 1)), (5, (1, 1)), (5, (0, 2)))]
    prompts = [tuple(each.of(request)) for each in variants]
    assert len(set(prompts)) == 4
    assert prompts[0] == tuple(TOKENS.of(request))


@pytest.mark.parametrize("vocabulary", [8, 700, 99000])
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(vocabulary: int) -> None:
    tokens = PromptTokens(vocabulary, 1, (0, 1))
    whole, part = (tokens.of(PlannedRequest(0, (Segment((1, 9), length),), 1)) for length in (512, 77))
    assert whole[:77] == part
    assert all(3 <= each < vocabulary for each in whole)


# -- traces ------------------------------------------------------------------------------------------------------

TRACE = [
    TraceRequest(timestamp=0, input_length=1100, output_length=50, hash_ids=(0, 1, 2)),
    TraceRequest(timestamp=3000, input_length=1024, output_length=0, hash_ids=(0, 1)),
    TraceRequest(timestamp=9000, input_length=5, output_length=9, hash_ids=(7,)),
]


def test_a_trace_keeps_its_times_lengths_and_shared_blocks() -> None:
    first, second, last = trace_plan(TRACE, Replay())
    assert [each.due for each in (first, second, last)] == [0, 3, 9]
    assert [each.input for each in (first, second, last)] == [1100, 1024, 5]
    assert [each.output for each in (first, second, last)] == [50, 1, 9]
    assert TOKENS.of(first)[:1024] == TOKENS.of(second)
    assert TOKENS.of(last) != TOKENS.of(first)[:5]


def test_a_trace_can_be_faster_shorter_and_cut() -> None:
    plan = trace_plan(TRACE, Replay(speed=2, length_scale=0.1, seconds=4))
    assert [(each.due, each.input, each.output) for each in plan] == [(0, 110, 5), (1.5, 102, 1)]
    assert TOKENS.of(plan[0])[:102] == TOKENS.of(plan[1])
    assert [each.input for each in trace_plan(TRACE, Replay(max_input=1024))] == [1024, 5]
    assert [each.input for each in trace_plan(TRACE, Replay(length_scale=0.001))] == [1, 1, 1]


# -- loads and turns ---------------------------------------------------------------------------------------------


def test_loads_have_their_plans() -> None:
    assert open_load(2, 30, SHAPE).plan(4) == poisson_plan(2, 30, SHAPE, 4)
    assert open_load(2, 30, SHAPE).clients == 0
    assert [len(closed_load(clients, None, SHAPE).plan(1)) for clients in (1, 8)] == [12, 32]
    assert len(closed_load(8, 5, SHAPE).plan(1)) == 5


async def test_servers_take_turns_and_each_comes_first_equally_often() -> None:
    async with aiohttp.ClientSession() as session:
        a, b = (Target(label, "", "", session) for label in "ab")
    order = [(target.label, seed) for target, seed in turns([a, b], [1, 2])]
    assert order == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]


# -- percentiles and goodput -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 50), (0.9, 90), (0.99, 99), (0.07, 7), (0.29, 29), (1, 100), (0.001, 1)]
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_percentiles_of_few_values() -> None:
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile([1.0, 2.0], 0.51) == 2.0
    assert math.isnan(percentile([], 0.5))


def test_a_curve_has_both_ends() -> None:
    assert curve([3.0, 1.0, 2.0], 3) == [1.0, 2.0, 3.0]
    assert curve(list(range(1001)), 5) == [0, 250, 500, 750, 1000]
    assert curve([]) == []


def test_a_run_is_summarised_from_every_gap() -> None:
    """A single late gap costs a request its goodput, and a failed request is no good one."""
    run = Run(
        [
            RequestTimes(first=0.1, gaps=[0.010] * 9, tokens=10),
            RequestTimes(first=0.1, gaps=[0.010] * 8 + [0.016], tokens=19),
            RequestTimes(first=0.201, gaps=[], tokens=1, lag=0.002),
            RequestTimes(first=0.1, error="status 503"),
        ],
        seconds=2.0,
    )
    found = summarise(run, Limits(0.2, 0.015))
    assert (found.requests, found.failed) == (4, 1)
    assert found.goodput == 0.25
    assert found.good_requests_per_s == 0.5
    assert (found.ttft_good, found.gaps_good) == (0.5, 0.5)
    assert found.requests_per_s == 1.5
    assert found.output_tokens_per_s == 15
    assert (found.ttft_ms_p50, found.ttft_ms_p99) == (100, 201)
    assert (found.gap_ms_p50, found.gap_ms_max) == (10, 16)
    assert found.second_ms_p99 == 10
    assert found.token_ms_p99 == pytest.approx(10)
    assert found.token_ms_p50 == pytest.approx(96 / 18)
    assert found.total_ms_p99 == pytest.approx(201)
    assert found.send_lag_ms_p99 == 2


def test_limits_may_be_met_exactly() -> None:
    times = RequestTimes(first=0.2, gaps=[0.015], tokens=2)
    assert times.within(0.2, 0.015)
    assert not times.within(0.199, 0.015)
    assert not times.within(0.2, 0.0149)


def test_runs_without_answers_have_no_percentiles() -> None:
    found = summarise(Run([RequestTimes(error="x")], seconds=1.0), Limits())
    assert math.isnan(found.ttft_ms_p50)
    assert found.goodput == 0


def test_a_late_generator_is_not_trusted() -> None:
    on_time = [RequestTimes(first=0.1, tokens=1)] * 98
    late = RequestTimes(first=0.1, tokens=1, lag=0.1)
    limits = Limits(lag=0.005)
    assert doubts(summarise(Run([*on_time, late], 1.0), limits), limits)[0] == (
        "requests were sent up to 100.0 ms after they were due (p99; 5 ms allowed)"
    )
    assert doubts(summarise(Run([*on_time, *on_time, late], 1.0), limits), limits) == []
    [doubt] = doubts(summarise(Run(on_time, 1.0, [0.0, 0.02]), limits), limits)
    assert doubt == "the generator read events up to 20.0 ms late (p99; 5 ms allowed)"


def test_the_longest_delay_of_the_generator_is_told() -> None:
    found = summarise(Run([RequestTimes(first=0.1, tokens=1)], 1.0, [0.001] * 999 + [0.08]), Limits())
    assert (found.loop_lag_ms_p99, found.loop_lag_ms_max) == (1, 80)


@pytest.mark.parametrize("clients", [0, 2])
async def test_no_garbage_collection_makes_a_gap_in_a_run(
    monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    """It has collected what was there before, and it collects again after the run, also after one that failed."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    async def run(server: Server, plan: Sequence[PlannedRequest], *rest: object) -> Run:
        assert collections[-1:] == [2]
        collections.clear()
        kept: list[list[int]] = [[] for _ in range(2 * gc.get_threshold()[0])]
        assert not collections, f"{len(kept)} new objects were visited"
        raise EOFError

    monkeypatch.setattr(measurement, "open_loop", run)
    monkeypatch.setattr(measurement, "closed_loop", run)
    load = closed_load(clients, 4, SHAPE) if clients else open_load(5, 1, SHAPE)
    gc.callbacks.append(note)
    try:
        async with aiohttp.ClientSession() as session:
            target = Target("a", "http://127.0.0.1:1/v1", "m", session)
            with pytest.raises(EOFError):
                await anext(Measurement([target], [load], [1], Bodies(700, 1), Limits()).run())
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


@pytest.mark.parametrize(("room", "before"), [(1 << 20, 4), (5, 2)])
async def test_bodies_are_made_before_an_open_loop_begins(
    room: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else making a long one would delay other requests. Their memory is bounded: each has 4 bytes here."""
    events: list[str] = []

    def body(request: PlannedRequest) -> bytes:
        events.append("made")
        return b"body"

    async def send(session: aiohttp.ClientSession, url: str, body: bytes, due: float | None) -> RequestTimes:
        events.append("sent")
        return RequestTimes()

    monkeypatch.setattr(runs, "MADE_BYTES", room)
    monkeypatch.setattr(runs, "stream_completion", send)
    plan = [PlannedRequest(due, (Segment((1, 9), 5),), 1) for due in (0.0, 0.01, 0.02, 0.03)]
    async with aiohttp.ClientSession() as session:
        run = await runs.open_loop(Server(session, "http://127.0.0.1:1", body), plan)
    assert events.index("sent") == before
    assert (events.count("made"), len(run.requests)) == (4, 4)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_seeds_are_put_together() -> None:
    run = Run([RequestTimes(first=0.1)], 2.0, [0.001])
    run.add(Run([RequestTimes(first=0.3)], 3.0, [0.002]))
    assert (len(run.requests), run.seconds, run.loop_lags) == (2, 5.0, [0.001, 0.002])


# -- events ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_may_arrive_in_any_parts(size: int) -> None:
    stream = b': comment\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n'
    splitter = EventSplitter()
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [data for part in parts for data in splitter.feed(part)] == [b'{"a": 1}', b"two", b"[DONE]"]
