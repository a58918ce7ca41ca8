"""Tests admission, headroom and the choice of a victim as pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.node.ageing import PROMOTION_SECONDS
from decode_node.admission import admit, choose_victim, headroom_pages, in_order
from decode_node.request import DecodeRequest

PEER = NodeRef(name="prefill-0", role="prefill", incarnation="0" * 32)


def request(
    room: int, prompt: int = 4, max_tokens: int = 10, launched: int = 0, emitted: int = 0
) -> DecodeRequest:
    made = DecodeRequest(
        room=room,
        request_id=f"r{room}",
        prompt=[1] * prompt,
        emitted=emitted,
        sampling=SamplingParams(max_tokens=max_tokens),
        prefill=PEER,
        received=0.0,
        deadline=1.0,
    )
    made.launched = launched
    return made


def rooms(requests: list[DecodeRequest]) -> list[int]:
    return [each.room for each in requests]


def test_first_in_first_out_while_everything_fits() -> None:
    queue = [request(n) for n in range(5)]
    assert rooms(admit(queue, 3, 4, lambda r: True)) == [0, 1, 2]


def test_a_small_one_may_pass_a_bounded_number_of_times() -> None:
    large = request(0)
    for turn in range(3):
        small = [request(n) for n in range(1, 5)]
        admitted = admit([large, *small], 10, 6, lambda r: r is not large)
        assert rooms(admitted) == ([1, 2, 3, 4] if turn == 0 else [1, 2] if turn == 1 else [])
    assert large.skipped == 6
    assert rooms(admit([large, request(9)], 10, 6, lambda r: True)) == [0, 9], "it is still the first in line"


def test_waiting_requests_are_ordered_by_length_and_by_how_long_they_wait() -> None:
    long, new, short = request(1, prompt=400), request(2, prompt=100), request(3, prompt=20)
    new.received = short.received = 25.0
    assert rooms(in_order([long, new, short], 25.0)) == [3, 2, 1]
    assert rooms(in_order([long, new, short], 100.0)) == [3, 2, 1]
    new.received = short.received = 200.0
    assert rooms(in_order([long, new, short], 201.0)) == [3, 1, 2], "20 / 11 < 400 / 211 < 100 / 11"
    new.waited = 190.0
    assert rooms(in_order([long, new, short], 201.0)) == [2, 3, 1], (
        "another node gave it back: 100 / 201 < 20 / 11"
    )
    same = [request(n) for n in range(5)]
    assert in_order(same, 3.0) == same


def test_no_skipping_is_strict_order() -> None:
    asked: list[int] = []

    def never(each: DecodeRequest) -> bool:
        asked.append(each.room)
        return False

    assert admit([request(n) for n in range(9)], 10, 0, never) == []
    assert asked == [0]


def test_a_long_queue_costs_no_more_than_the_skips() -> None:
    asked: list[int] = []

    def never(each: DecodeRequest) -> bool:
        asked.append(each.room)
        return False

    assert admit([request(n) for n in range(1000)], 10, 8, never) == []
    assert len(asked) == 9


@given(
    st.lists(st.integers(1, 20), max_size=30),
    st.integers(0, 60),
    st.integers(0, 10),
    st.integers(0, 5),
)
def test_admission_properties(sizes: list[int], free: int, slots: int, max_skips: int) -> None:
    queue = [request(n, prompt=size) for n, size in enumerate(sizes)]
    left, refused = free, list[int]()

    def fits(each: DecodeRequest) -> bool:
        nonlocal left
        if len(each.prompt) > left:
            refused.append(each.room)
            return False
        left -= len(each.prompt)
        return True

    admitted = admit(queue, slots, max_skips, fits)
    assert len(admitted) <= slots
    assert left >= 0
    assert rooms(admitted) == sorted(rooms(admitted)), "in order of arrival"
    assert len(refused) <= max_skips + 1
    for room in refused:
        assert queue[room].skipped == sum(each.room > room for each in admitted) <= max_skips
    if queue and slots and len(queue[0].prompt) <= free:
        assert admitted[0] is queue[0], "the first in line is never passed while it fits"


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.integers(0, 4))
def test_nobody_starves(sizes: list[int], max_skips: int) -> None:
    """Every request is admitted in time although small ones keep arriving and one unit of room is freed per turn."""
    queue = [request(n, prompt=size) for n, size in enumerate(sizes)]
    free, first = 0, queue[0]
    for turn in range(25 * (max_skips + 2)):
        free += 1  # noqa: SIM113 - it is spent below
        queue.append(request(len(sizes) + turn, prompt=1))

        def fits(each: DecodeRequest) -> bool:
            nonlocal free
            if len(each.prompt) > free:
                return False
            free -= len(each.prompt)
            return True

        for each in admit(tuple(queue), 64, max_skips, fits):
            queue.remove(each)
        if first not in queue:
            return
    raise AssertionError("the first request is still waiting")


def test_headroom_is_what_may_still_be_emitted() -> None:
    active = [
        request(0, max_tokens=100, launched=1),
        request(1, max_tokens=10, launched=8),
        request(2, launched=10),
    ]
    assert headroom_pages(active, 32, 16) == 2 + 1 + 0
    assert headroom_pages(active, 0, 16) == 0
    assert headroom_pages([], 256, 16) == 0
    assert headroom_pages([request(0, max_tokens=30, emitted=28)], 256, 1) == 2, (
        "emitted by an earlier attempt"
    )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), max_size=10),
    st.integers(1, 300),
    st.integers(1, 64),
)
def test_headroom_lets_everybody_take_a_step(
    active: list[tuple[int, int]], reserved: int, page_size: int
) -> None:
    requests = [request(n, max_tokens=most, launched=launched) for n, (most, launched) in enumerate(active)]
    pages = headroom_pages(requests, reserved, page_size)
    assert pages >= sum(r.remaining() > 0 for r in requests)
    assert pages * page_size >= sum(min(r.remaining(), reserved) for r in requests)


def test_the_victim_is_the_least_progressed() -> None:
    running = [
        request(0, 5, launched=9),
        request(1, 5, launched=3),
        request(2, 8, launched=3),
        request(3, 2, launched=4),
    ]
    victim = choose_victim(running)
    assert victim is running[2], "fewest tokens, then the longest prompt"
    running[2].retract = True
    assert choose_victim(running) is running[1]
    running[1].ended = True
    assert choose_victim(running) is running[3]
    assert choose_victim([]) is None
    for each in running:
        each.retract = True
    assert choose_victim(running) is None


def test_priority_orders_the_queue_and_the_victims() -> None:
    long, new, short = request(1, prompt=400), request(2, prompt=100), request(3, prompt=20)
    long.priority, short.priority = -2, 1
    assert rooms(in_order([short, new, long], 1.0)) == [1, 2, 3]
    later = 3 * PROMOTION_SECONDS
    assert rooms(in_order([short, new, long], later)) == [3, 2, 1], "all are as urgent as the first by now"
    long.launched = new.launched = 1
    short.launched = 9
    assert choose_victim([long, new, short]) is short, "the least urgent, whatever its progress"


def test_lengths_of_a_request() -> None:
    made = request(1, prompt=7, max_tokens=5, launched=1)
    assert (made.seq_len, made.max_output, made.remaining(), made.exhausted) == (7, 5, 4, False)
    made.launched = 5
    assert (made.seq_len, made.remaining()) == (11, 0)
    made.output = [3, 4]
    assert made.computed() == [1] * 7 + [3]


def test_lengths_are_an_upper_bound_until_a_step_is_read() -> None:
    """Steps of up to 4 tokens: a step in flight counts as 4 for the pages and as 1 for the end."""
    made = request(1, prompt=7, max_tokens=5, launched=1)
    made.output = [9]
    made.step_launched(4)
    made.step_launched(4)
    assert (made.seq_len, made.in_flight, made.exhausted) == (15, 2, False)
    made.step_read(4, drawn=1)
    made.output += [9]
    assert (made.seq_len, made.in_flight, made.exhausted) == (12, 1, False)
    made.step_read(4, drawn=3)
    made.output += [9, 9, 9]
    assert (made.seq_len, made.remaining(), made.exhausted) == (11, 0, True)
    assert made.most_kv == 11, "the last token needs no KV"
