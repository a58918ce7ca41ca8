"""The parts of a request cover all of its time, whatever nodes report."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.metrics.request_stages import ENDS, PARTS, Part, parts_of
from router.metrics.timeline import Timeline

Times = dict[str, float]
WHOLE = {
    "prefill": {"prefill_start": 1.0, "prefill_end": 2.0},
    "decode": {"record_seen": 3.0, "step_started": 4.0, "first_decode": 5.0},
}


def timeline(reported: dict[str, Times], outcome: str = "stop", placed: float = 0.5) -> Timeline:
    made = Timeline("r", 0.0)
    made.mark("entered", 0.25)
    made.mark("placed", placed)
    attempt = made.begin_attempt()
    for node, stages in reported.items():
        made.anchor(attempt, stages, node, 0.0)
    made.mark("finished", 8.0)
    made.outcome = outcome
    return made


def parts_in(made: Timeline) -> list[Part]:
    return parts_of(made.final_stages, made.completed)


def names(made: Timeline) -> list[str]:
    return [name for name, _, _ in parts_in(made)]


def test_a_whole_request_has_all_parts_of_an_answer_by_the_decode_node() -> None:
    parts = parts_in(timeline(WHOLE))
    assert [name for name, _, _ in parts] == list(ENDS)
    assert [end for _, _, end in parts] == [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("reported", "outcome", "last"),
    [
        ({"prefill": WHOLE["prefill"]}, "length", "router.answer"),  # it ended with its first token
        ({"prefill": WHOLE["prefill"]}, "client gone", "kv.transfer"),
        ({"prefill": {"prefill_start": 1.0}}, "client gone", "prefill.compute"),
        ({}, "error: node_lost", "prefill.queue"),
    ],
)
def test_the_last_part_of_requests_that_end_early(
    reported: dict[str, Times], outcome: str, last: str
) -> None:
    assert names(timeline(reported, outcome))[-1] == last


def test_a_part_without_an_end_is_merged_into_the_next() -> None:
    late = {"decode": WHOLE["decode"]}  # the prefill node reports after the end of the request
    assert names(timeline(late))[2:] == ["kv.transfer", "decode.queue", "decode.stream"]


seconds = st.floats(-5, 20, allow_nan=False)
stages = st.fixed_dictionaries(
    {},
    optional={
        "prefill_start": seconds,
        "prefill_end": seconds,
        "record_seen": seconds,
        "step_started": seconds,
    },
)


@given(stages, stages, st.sampled_from(["stop", "length", "client gone", "error: internal"]), st.floats(0, 8))
def test_parts_follow_each_other_from_the_arrival_to_the_end(
    prefill: Times, decode: Times, outcome: str, placed: float
) -> None:
    parts = parts_in(timeline({"prefill": prefill, "decode": decode}, outcome, placed))
    assert parts[0][1] == 0.0
    assert parts[-1][2] == 8.0
    assert all(before[2] == after[1] for before, after in pairwise(parts))
    assert all(begin <= end for _, begin, end in parts)
    assert {name for name, _, _ in parts} <= set(PARTS)
