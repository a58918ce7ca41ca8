"""Intervals that were free of faults."""

from __future__ import annotations

import pytest

from tests.chaos.timeline import Interval, Timeline, healthy_stretches


@pytest.mark.parametrize(
    ("impaired", "expected"),
    [
        ([], [(0.0, 10.0)]),
        ([(2.0, 3.0)], [(0.0, 2.0), (3.0, 10.0)]),
        ([(2.0, 6.0), (5.0, 7.0)], [(0.0, 2.0), (7.0, 10.0)]),
        ([(5.0, 5.0)], [(0.0, 5.0), (5.0, 10.0)]),
        ([(-1.0, 4.0), (9.0, 12.0)], [(4.0, 9.0)]),
        ([(-1.0, 20.0)], []),
        ([(20.0, 30.0)], [(0.0, 10.0)]),
    ],
)
def test_healthy_stretches_are_what_no_interval_touches(
    impaired: list[Interval], expected: list[Interval]
) -> None:
    assert healthy_stretches(impaired, (0.0, 10.0)) == expected


def test_parts_are_impaired_while_a_fault_holds_them() -> None:
    timeline = Timeline()
    timeline.begin("1", ["a", "b"], kind="stop")
    timeline.begin("2", ["b"], kind="reset")
    assert timeline.impaired == {"a", "b"}
    timeline.end("1")
    assert timeline.impaired == {"b"}
    assert [note["event"] for note in timeline.notes] == ["begin", "begin", "end"]
