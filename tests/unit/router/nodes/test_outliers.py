"""Outliers (nodes that are slow but not dead) are found from given measurements on a clock that the test advances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes import outliers as module
from router.nodes.outliers import Outliers
from tests.fakes.clock import Clock


def after(seconds: float, speeds: dict[str, float], clock: Clock, found: Outliers) -> dict[str, float]:
    """Return the weights after all nodes were measured for `seconds`, twice per second."""
    for _ in range(int(2 * seconds)):
        for name, per_token in speeds.items():
            for _ in range(3):
                found.measured(name, 10 * per_token, 10)
        found.judge(sorted(speeds))
        clock.now += 0.5
    return {name: found.weight(name) for name in speeds}


def test_a_slow_node_takes_a_smaller_share_after_a_while_and_recovers() -> None:
    clock = Clock()
    found = Outliers(clock)
    slow = {"a": 0.01, "b": 0.011, "c": 0.05}
    assert after(3, slow, clock, found) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert after(3, slow, clock, found) == {"a": 1.0, "b": 1.0, "c": pytest.approx(0.011 / 0.05)}
    assert found.seconds_per_token("c") == pytest.approx(0.05)
    well = {**slow, "c": 0.011}
    assert after(15, well, clock, found) == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_requests_of_any_length_are_compared_by_token() -> None:
    clock = Clock()
    found = Outliers(clock)
    for number in range(40):
        for name, tokens in (("a", 10), ("b", 10 if number < 20 else 1000)):
            found.measured(name, 0.01 * tokens, tokens)
        clock.now += 0.5
        found.judge(["a", "b"])
        assert found.none
    assert found.seconds_per_token("b") == pytest.approx(0.01)


def test_a_node_stays_slow_while_it_is_measured() -> None:
    """Whether any node is slow is known at once, as every placement asks."""
    clock = Clock()
    found = Outliers(clock)
    assert found.none
    speeds = {"a": 0.01, "b": 0.05}
    after(5, speeds, clock, found)
    for _ in range(int(3 * module.STALE)):
        assert after(1, speeds, clock, found)["b"] == pytest.approx(0.2)
        assert not found.none
    found.forget("b")
    assert found.none


def test_twice_the_median_is_slow_only_for_a_node_that_was_slower() -> None:
    clock = Clock()
    found = Outliers(clock)
    assert after(10, {"a": 0.01, "b": 0.025}, clock, found)["b"] == 1.0
    assert after(10, {"a": 0.01, "b": 0.06}, clock, found)["b"] < 0.2
    assert after(20, {"a": 0.01, "b": 0.025}, clock, found)["b"] == pytest.approx(0.4, rel=0.1)
    assert after(20, {"a": 0.01, "b": 0.015}, clock, found)["b"] == 1.0


def test_a_short_hiccup_changes_nothing() -> None:
    clock = Clock()
    found = Outliers(clock)
    after(5, {"a": 0.01, "b": 0.01}, clock, found)
    for _ in range(10):
        assert after(1, {"a": 0.01, "b": 0.04}, clock, found) == {"a": 1.0, "b": 1.0}
        assert after(5, {"a": 0.01, "b": 0.01}, clock, found) == {"a": 1.0, "b": 1.0}


def test_a_node_that_is_no_longer_measured_regains_its_full_share() -> None:
    clock = Clock()
    found = Outliers(clock)
    assert after(6, {"a": 0.01, "b": 0.5}, clock, found) == {"a": 1.0, "b": module.MIN_WEIGHT}
    clock.now += module.STALE + 1
    found.judge(["a", "b"])
    assert found.weight("b") == 1.0


def test_a_role_of_one_node_has_no_outlier() -> None:
    clock = Clock()
    found = Outliers(clock)
    after(6, {"a": 0.01, "b": 0.5}, clock, found)
    found.judge(["b"])
    assert found.weight("b") == 1.0
    found.forget("b")
    assert found.seconds_per_token("b") is None


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=9))
def test_at_most_half_of_a_role(speeds: list[float]) -> None:
    clock = Clock()
    weights = after(5, {f"n{i}": speed for i, speed in enumerate(speeds)}, clock, Outliers(clock))
    assert sum(weight < 1.0 for weight in weights.values()) <= len(speeds) // 2
    assert all(module.MIN_WEIGHT <= weight <= 1.0 for weight in weights.values())
    assert weights[f"n{speeds.index(min(speeds))}"] == 1.0
