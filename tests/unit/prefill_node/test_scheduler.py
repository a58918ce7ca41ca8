"""Chunked prefill as a pure function."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.messages.generation import SamplingParams
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import plan_chunks


def request(room: int, tokens: int, scheduled: int = 0, ended: bool = False) -> PrefillRequest:
    return PrefillRequest(
        room=room,
        request_id=f"r{room}",
        keys=np.arange(tokens),
        emitted=0,
        sampling=SamplingParams(max_tokens=1),
        decode="d",
        received=0.0,
        deadline=1.0,
        scheduled=scheduled,
        ended=ended,
    )


def plan(requests: list[PrefillRequest], budget: int, most: int = 99) -> list[tuple[int, int, int, bool]]:
    return [(c.request.room, c.start, c.length, c.final) for c in plan_chunks(requests, budget, most)]


def test_the_prompt_that_meets_the_end_of_the_budget_is_cut_there() -> None:
    requests = [request(1, 10), request(2, 10, scheduled=4), request(3, 10)]
    assert plan(requests, 18) == [(1, 0, 10, True), (2, 4, 6, True), (3, 0, 2, False)]
    assert plan(requests, 16) == [(1, 0, 10, True), (2, 4, 6, True)]
    assert plan(requests, 1) == [(1, 0, 1, False)]
    assert plan(requests, 99, most=2) == [(1, 0, 10, True), (2, 4, 6, True)]


def test_prompts_that_are_launched_whole_or_ended_are_passed_over() -> None:
    assert plan([request(1, 5, scheduled=5), request(2, 5, ended=True), request(3, 5)], 8) == [
        (3, 0, 5, True)
    ]
    assert plan([], 8) == []


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), max_size=12),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_chunk_properties(shapes: list[tuple[int, int, bool]], budget: int, most: int) -> None:
    requests = [request(n, size, min(done, size), ended) for n, (size, done, ended) in enumerate(shapes)]
    chunks = plan_chunks(requests, budget, most)
    assert len(chunks) <= most
    assert sum(chunk.length for chunk in chunks) <= budget
    assert [c.request.room for c in chunks] == sorted({c.request.room for c in chunks})
    assert all(c.length > 0 and c.start == c.request.scheduled and not c.request.ended for c in chunks)
    assert all(c.final for c in chunks[:-1]), "only the last one is cut"
    open_ones = [r for r in requests if r.remaining and not r.ended]
    if open_ones:
        assert chunks[0].request is open_ones[0], "the oldest prompt always advances"
        full = len(chunks) == most or sum(c.length for c in chunks) == budget
        assert full or len(chunks) == len(open_ones), "no budget is left while a prompt waits"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 50))
def test_every_prompt_ends(sizes: list[int], budget: int) -> None:
    requests = [request(n, size) for n, size in enumerate(sizes)]
    for _ in range(-(-sum(sizes) // budget)):
        for chunk in plan_chunks(requests, budget, 99):
            chunk.request.scheduled += chunk.length
    assert all(r.remaining == 0 for r in requests)
