"""Chunked prefill as a pure function."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.generation import ImageSpan, SamplingParams
from common.node.ageing import AGEING_SECONDS, PROMOTION_SECONDS
from common.node.announced_work import CONTEXT_TOKENS
from prefill_node.cost_curve import CostCurve
from prefill_node.limits import whole_chunks
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import (
    IMAGE_WEIGHT,
    MAX_PAUSE,
    Chunk,
    chunk_work,
    cost,
    fewest_keys_first,
    in_order,
    plan_chunks,
)


def request(
    room: int, tokens: int, scheduled: int = 0, ended: bool = False, received: float = 0.0
) -> PrefillRequest:
    return PrefillRequest(
        room=room,
        request_id=f"r{room}",
        keys=np.arange(tokens),
        emitted=0,
        sampling=SamplingParams(max_tokens=1),
        decode="d",
        received=received,
        scheduled=scheduled,
        ended=ended,
    )


def curve_to(largest: int, grid: int = 1) -> CostCurve:
    """Return the default curve, with a size for each number of tokens."""
    return CostCurve(range(1, largest + 1), grid=grid)


def plan(
    requests: list[PrefillRequest], curve: CostCurve, most: int = 99
) -> list[tuple[int, int, int, bool]]:
    chunks = plan_chunks(requests, 0.0, curve, most)
    return [(each.request.room, each.start, each.length, each.final) for each in chunks]


def test_prompts_that_cost_nothing_more_share_a_forward() -> None:
    requests = [request(1, 10), request(2, 10, scheduled=4), request(3, 10)]
    flat = CostCurve((32, 64), {32: 5.0, 64: 10.0})
    assert plan(requests, flat) == [(2, 4, 6, True), (1, 0, 10, True), (3, 0, 10, True)]
    assert plan(requests, flat, most=2) == [(2, 4, 6, True), (1, 0, 10, True)]
    linear = CostCurve((6, 10, 16, 26), {6: 6.0, 26: 26.0})
    assert plan(requests, linear) == [(2, 4, 6, True)], "in one forward the first would wait for all"


def test_a_long_prompt_is_cut_at_the_step_of_the_curve() -> None:
    linear = CostCurve((8, 16, 32), {8: 8.0, 16: 16.0, 32: 32.0})
    assert plan([request(1, 30)], linear) == [(1, 0, 8, False)]
    cheap = CostCurve((8, 16, 32), {8: 8.0, 16: 9.0, 32: 10.0})
    assert plan([request(1, 30)], cheap) == [(1, 0, 30, True)]
    assert plan([request(1, 40)], cheap) == [(1, 0, 32, False)]


def test_padding_is_filled_with_the_next_prompt() -> None:
    """A forward of 20 tokens takes as long as one of 32, and the next prompt's own becomes shorter."""
    sized = CostCurve((16, 32, 64), {16: 10.0, 32: 21.0, 64: 42.0})
    assert plan([request(1, 12), request(2, 20)], sized) == [(1, 0, 12, True), (2, 0, 4, False)]
    assert plan([request(1, 12), request(2, 16)], sized) == [(1, 0, 12, True)], "16 tokens gain nothing by 12"
    chunks = plan_chunks([request(1, 12), request(2, 20)], 0.0, sized, 99, grid=8)
    assert [chunk.length for chunk in chunks] == [12], "cut at no multiple of the grid"


def test_attention_begins_with_the_tokens_that_see_most_keys() -> None:
    """It computes the last chunk first."""
    cached, fresh, cut = (
        Chunk(request(1, 30_000), 29_936, 64),
        Chunk(request(2, 4000), 0, 4000),
        Chunk(request(3, 9), 0, 8),
    )
    for chunks in itertools.permutations((cached, fresh, cut)):
        assert fewest_keys_first(chunks) == [cut, fresh, cached]


def test_prompts_that_are_not_admitted_count_among_those_that_wait() -> None:
    """Together both take 16 ms instead of 10 ms each: worth it only if enough others gain."""
    sized = CostCurve((16, 32), {16: 10.0, 32: 16.0})
    both = [request(1, 16), request(2, 16)]
    assert [len(plan_chunks(both, 0.0, sized, 99, waiting=waiting)) for waiting in (0, 9)] == [1, 2]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 300))
def test_prompts_of_a_model_with_a_grid_are_cut_only_there(lengths: list[int], wanted: int) -> None:
    grid = 48
    budget = whole_chunks(wanted, grid)
    assert budget % grid == 0
    assert grid <= budget <= max(wanted, grid)
    requests, curve = [request(room, tokens) for room, tokens in enumerate(lengths)], curve_to(budget, grid)
    while any(each.remaining for each in requests):
        chunks = plan_chunks(requests, 0.0, curve, 4, grid)
        assert chunks
        assert sum(chunk.length for chunk in chunks) <= budget
        for chunk in chunks:
            assert chunk.start == chunk.request.scheduled
            chunk.request.scheduled += chunk.length
            assert chunk.final or chunk.request.scheduled % grid == 0


def test_prompts_that_are_launched_whole_or_ended_are_passed_over() -> None:
    waiting = [request(1, 5, scheduled=5), request(2, 5, ended=True), request(3, 5)]
    assert plan(waiting, curve_to(8)) == [(3, 0, 5, True)]
    assert plan([], curve_to(8)) == []


def test_a_short_prompt_passes_long_ones_that_have_waited_for_minutes() -> None:
    long = [request(room, 2000, received=-60.0) for room in range(200)]
    short = request(999, 20)
    assert plan_chunks([*long, short], 0.0, curve_to(64), 99)[0].request is short
    assert next(in_order([*long, short], 0.0)) is short


def test_equal_prompts_are_served_in_the_order_in_which_they_came() -> None:
    requests = [request(room, 50, received=float(room // 3)) for room in range(30)]
    assert list(in_order(requests, 40.0)) == requests
    assert [each.room for each in in_order(reversed(requests[:3]), 40.0)] == [2, 1, 0], "the first of equals"


def test_lower_priorities_go_first_whatever_their_length() -> None:
    normal, urgent, modest = request(1, 20), request(2, 2000), request(3, 10)
    urgent.priority, modest.priority = -1, 5
    assert list(in_order([normal, modest, urgent], 1.0)) == [urgent, normal, modest]


def test_waiting_raises_the_priority_up_to_that_of_the_most_urgent() -> None:
    """A stream of urgent prompts delays the others, but not for ever."""
    waiting = request(1, 20)
    urgent = [request(room, 20, received=PROMOTION_SECONDS - 1) for room in range(2, 6)]
    for each in urgent:
        each.priority = -1
    assert next(in_order([waiting, *urgent], PROMOTION_SECONDS - 0.5)) is urgent[0]
    assert next(in_order([waiting, *urgent], PROMOTION_SECONDS)) is waiting
    old, new = request(1, 2000), request(2, 20, received=95.0)
    assert next(in_order([old, new], 100.0)) is new, "among equal priorities nothing is raised"


def test_only_the_time_since_its_arrival_raises_the_priority_of_a_prompt() -> None:
    """A node that has been up for long does not forget priorities."""
    start = 1000 * PROMOTION_SECONDS
    modest, urgent = request(1, 20, received=start), request(2, 2000, received=start)
    urgent.priority = -1
    assert next(in_order([modest, urgent], start + 0.9 * PROMOTION_SECONDS)) is urgent
    assert next(in_order([modest, urgent], start + PROMOTION_SECONDS)) is modest


def test_a_prompt_that_a_node_gave_back_keeps_its_turn() -> None:
    first, moved = request(1, 200, received=50.0), request(2, 200, received=60.0)
    assert next(in_order([first, moved], 61.0)) is first
    moved.waited = 30.0
    assert next(in_order([first, moved], 61.0)) is moved


def test_a_started_prompt_advances_at_least_once_a_second() -> None:
    """Its decode node has received pages of it and waits for the next ones."""
    begun, other = request(1, 2000, scheduled=64), request(2, 3000, scheduled=64)
    begun.launched_at, other.launched_at = 10.0, 9.5
    short = [request(room, 20, received=10.0) for room in range(3, 9)]
    assert [each.room for each in in_order([begun, other, *short], 10.4)][:1] == [3]
    assert [each.room for each in in_order([begun, other, *short], 10.6)][:2] == [2, 3]
    assert [each.room for each in in_order([begun, other, *short], 11.0)][:3] == [2, 1, 3]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=40), st.integers(1, 16)
)
def test_no_prompt_pauses_for_long(arrivals: list[tuple[int, int]], budget: int) -> None:
    """However many shorter ones arrive, at most one chunk of each other started prompt runs before its next one."""
    second, requests, now, curve = 0.3, list[PrefillRequest](), 0.0, curve_to(budget)
    for count, tokens in [*arrivals, *[(0, 0)] * 200]:
        requests += [request(len(requests) + each, tokens, received=now) for each in range(count)]
        for chunk in plan_chunks(requests, now, curve, 99):
            chunk.request.launched_at = now
            chunk.request.scheduled += chunk.length
        begun = [each for each in requests if each.remaining and each.scheduled]
        assert all(now - each.launched_at <= MAX_PAUSE + second * len(begun) for each in begun)
        now += second


def test_waiting_counts_as_documented() -> None:
    """A prompt of twice the length costs as little after AGEING_SECONDS, one of four times after three times that."""
    new = cost(request(1, 100), 0.0)
    assert cost(request(2, 200, received=-AGEING_SECONDS), 0.0) == new
    assert cost(request(3, 400, received=-3 * AGEING_SECONDS), 0.0) == new
    assert cost(request(4, 400, scheduled=200, received=-AGEING_SECONDS), 0.0) == new


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans(), st.floats(0, 9)), max_size=12),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_chunk_properties(shapes: list[tuple[int, int, bool, float]], budget: int, most: int) -> None:
    requests = [
        request(n, size, min(done, size), ended, received)
        for n, (size, done, ended, received) in enumerate(shapes)
    ]
    chunks = plan_chunks(requests, 9.0, curve_to(budget), most)
    assert len(chunks) <= most
    assert sum(chunk.length for chunk in chunks) <= budget
    costs = [cost(chunk.request, 9.0) for chunk in chunks]
    assert costs == sorted(costs)
    assert all(c.length > 0 and c.start == c.request.scheduled and not c.request.ended for c in chunks)
    assert all(c.final for c in chunks[:-1]), "only the last one is cut"
    unfinished = [r for r in requests if r.remaining and not r.ended]
    assert bool(chunks) == bool(unfinished)
    if unfinished:
        assert costs[0] == min(cost(each, 9.0) for each in unfinished), "the nearest always advances"


@settings(max_examples=40)
@given(
    long=st.integers(2, 60),
    short=st.integers(1, 3),
    budget=st.integers(1, 8),
    queue=st.integers(1, 12),
    seconds=st.floats(0.01, 2.0),
)
def test_a_long_prompt_is_not_starved_by_short_ones(
    long: int, short: int, budget: int, queue: int, seconds: float
) -> None:
    """There are always as many short ones as the queue holds: more than the node can ever serve.

    A short one waits until all that came before it are served, so its cost is at most short / AGEING_SECONDS and at
    least short / (AGEING_SECONDS + that time); the long one runs when its own cost is lower.
    """
    patient, curve = request(0, max(long, short + 1)), curve_to(budget)
    rooms, waiting, now = itertools.count(1), [patient], 0.0
    # The cost of a short prompt while it overtakes the long one.
    oldest = AGEING_SECONDS + seconds * (queue * max(short / curve.step, 1) + 2)
    bound = patient.num_tokens / short * oldest + seconds * (patient.num_tokens / curve.step + 2)
    while patient.remaining:
        waiting += [request(next(rooms), short, received=now) for _ in range(queue + 1 - len(waiting))]
        for chunk in plan_chunks(waiting, now, curve, 99):
            chunk.request.scheduled += chunk.length
        waiting = [each for each in waiting if each.remaining]
        now += seconds
        assert now <= bound


def test_work_counts_context_and_whole_images() -> None:
    first, later = request(1, 100), request(2, 20_000, scheduled=16_000)
    short, deep = chunk_work([Chunk(first, 0, 64)]), chunk_work([Chunk(later, 16_000, 64)])
    assert short.tokens == deep.tokens == 64
    assert short.at_most < 65
    assert deep.at_most > 64 * (1 + 16_000 / CONTEXT_TOKENS)
    image = ImageSpan(offset=30, length=576, digest=bytes(32))
    first.images = (image,)
    assert chunk_work([Chunk(first, 0, 31)]).at_most > 31 + 576 * IMAGE_WEIGHT
    assert chunk_work([Chunk(first, 0, 30)]).at_most < 31
