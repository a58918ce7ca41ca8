"""The meter of a node's silences counts them as a router does: from turn to turn, past what was announced."""

from __future__ import annotations

from copy import copy

from tests.fakes.clock import Clock
from tests.fakes.punctual_node import SilenceMeter, Silences


def test_silences_are_measured_from_turn_to_turn_and_past_what_was_announced() -> None:
    clock, reports = Clock(), list[Silences]()
    meter = SilenceMeter(clock, lambda found: reports.append(copy(found)))
    clock.now += 100.0
    meter.announced(0.0)
    meter.turned()
    assert not reports, "a start is no silence"
    clock.now += 1.0
    meter.turned()
    assert reports[-1] == Silences(1.0, 1.0)
    meter.announced(5.0)
    clock.now += 4.0
    meter.announced(2.0)
    clock.now += 2.0
    meter.turned()
    assert reports[-1] == Silences(6.0, 1.0), "all of it was announced"
    meter.announced(1.0)
    clock.now += 3.0
    meter.turned()
    assert reports[-1] == Silences(6.0, 2.0)
