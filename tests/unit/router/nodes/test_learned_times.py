"""The times that the router learns from requests: steps of decode nodes and transfers of pairs; and sessions."""

from __future__ import annotations

from random import Random

import pytest

from router.nodes.measured_steps import MIN_SLOPE_MS, UNMEASURED, MeasuredSteps
from router.nodes.measured_transfers import MAX_PAIRS, MeasuredTransfers
from router.nodes.session_nodes import MAX_SESSIONS, SessionNodes
from tests.fakes.clock import Clock


def test_steps_follow_the_measured_line() -> None:
    steps, rng = MeasuredSteps(), Random(1)
    assert steps.time == pytest.approx(UNMEASURED)
    for _ in range(2000):
        requests = rng.randrange(1, 65)
        steps.measured(requests, 6.0 + 0.25 * requests + rng.uniform(-1, 1))
    assert steps.time.fixed == pytest.approx(6.0, abs=0.5)
    assert steps.time.each == pytest.approx(0.25, abs=0.02)


def test_a_new_speed_replaces_the_old_one() -> None:
    steps = MeasuredSteps()
    for fixed in (5.0, 20.0):
        for number in range(3000):
            steps.measured(number % 32 + 1, fixed + 0.1 * (number % 32 + 1))
    assert steps.time.fixed == pytest.approx(20.0, abs=0.5)


def test_a_further_request_always_costs_something() -> None:
    steps = MeasuredSteps()
    for number in range(1000):
        steps.measured(number % 32 + 1, 10.0 - 0.1 * (number % 32))
    assert steps.time.each == MIN_SLOPE_MS
    steps.measured(3, -1.0)
    assert steps.time.fixed > 0


def test_a_pair_has_its_own_time_and_others_the_average() -> None:
    times = MeasuredTransfers()
    assert times.ms("p", "d", 1000) == 0
    for _ in range(100):
        times.measured("p", "near", 0.001, 1000)
        times.measured("p", "far", 0.020, 1000)
    assert times.ms("p", "near", 2000) == pytest.approx(2.0)
    assert times.ms("p", "far", 2000) == pytest.approx(40.0)
    assert 2.0 < times.ms("p", "new", 2000) < 40.0
    times.forget("far")
    assert times.ms("p", "far", 2000) == times.ms("p", "new", 2000)
    times.measured("p", "near", 1.0, 0)
    assert times.ms("p", "near", 2000) == pytest.approx(2.0), "nothing was moved"


def test_one_node_that_reports_absurd_times_does_not_spoil_the_others_for_long() -> None:
    steps, times = MeasuredSteps(), MeasuredTransfers()
    steps.measured(1, 1e15)
    times.measured("p", "liar", 1e15, 1000)
    for number in range(5000):
        steps.measured(number % 32 + 1, 5.0 + 0.1 * (number % 32 + 1))
    for _ in range(150):
        times.measured("p", "honest", 0.010, 1000)
    assert steps.time.ms(8) == pytest.approx(5.8, rel=0.05)
    assert times.ms("p", "new", 1000) == pytest.approx(10.0, rel=0.05)


def test_pairs_are_bounded() -> None:
    times = MeasuredTransfers()
    for number in range(MAX_PAIRS + 10):
        times.measured("p", f"d{number}", (1.0 + number) / 1000, 1000)
    average = times.ms("p", "new", 1)
    assert times.ms("p", "d0", 1) == average
    assert times.ms("p", f"d{MAX_PAIRS}", 1) == pytest.approx((1.0 + MAX_PAIRS) / 1000)


def test_a_session_is_remembered_for_a_while() -> None:
    clock = Clock()
    sessions = SessionNodes(10.0, clock)
    sessions.placed(b"", "p0", "d0")
    assert sessions.nodes(b"") == ()
    assert len(sessions) == 0
    sessions.placed(b"a", "p0", "d0")
    sessions.placed(b"b", "p1", "d1")
    clock.now += 9
    sessions.placed(b"a", "p2", "d0")
    clock.now += 2
    assert sessions.nodes(b"a") == ("p2", "d0")
    assert sessions.nodes(b"b") == ()
    sessions.placed(b"c", "p0", "d0")
    assert len(sessions) == 2, "old ones are forgotten"


def test_sessions_are_bounded() -> None:
    sessions = SessionNodes(10.0, Clock())
    for number in range(MAX_SESSIONS + 5):
        sessions.placed(b"%d" % number, "p", "d")
    assert len(sessions) == MAX_SESSIONS
    assert sessions.nodes(b"4") == ()
    assert sessions.nodes(b"5") == ("p", "d")
