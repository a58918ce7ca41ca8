"""A pure policy chooses the number of drafts in a chain from acceptance and from the time of rounds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.speculative.width_policy import (
    DECISION_ROUNDS,
    REFRESH_ROUNDS,
    TRIAL_ROUNDS,
    Acceptance,
    WidthPolicy,
    batches_of,
    classes_up_to,
)

Cost = Callable[[int, int], float]


def memory_bound(batch: int, width: int) -> float:
    """Return the seconds of a round where weights are read once and each draft adds a twentieth."""
    return 0.01 * (1.0 + 0.05 * width)


def compute_bound(batch: int, width: int) -> float:
    """Return the seconds of a round where each verified token adds as much again."""
    return 0.01 * batch * (1.0 + width)


def settle(
    policy: WidthPolicy, batch: int, right: float, cost: Cost, rounds: int = 400, seed: int = 0
) -> list[int]:
    """Return the widths of many rounds in which a draft that follows right ones is right with probability `right`."""
    draws, widths = random.Random(seed), []
    for _ in range(rounds):
        width = policy.choose(batch)
        accepted = []
        for _ in range(batch):
            count = 0
            while count < width and draws.random() < right:
                count += 1
            accepted.append(count)
        policy.observe(batch, width, accepted, cost(batch, width))
        widths.append(width)
    return widths


def usual(widths: list[int]) -> int:
    """Return the commonest width of the second half."""
    tail = widths[len(widths) // 2 :]
    return max(set(tail), key=tail.count)


def rate(widths: list[int], batch: int, right: float, cost: Cost) -> float:
    """Return tokens per request and second."""
    tokens = sum(right**place for width in widths for place in range(width + 1))
    return tokens / sum(cost(batch, width) for width in widths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("batch", "right", "cost", "best"),
    [
        (1, 0.95, memory_bound, 7),
        (1, 0.4, memory_bound, 3),
        (1, 0.02, memory_bound, 1),
        (8, 0.95, memory_bound, 5),
        (8, 0.02, memory_bound, 0),
        (16, 0.95, compute_bound, 0),
        (64, 0.8, memory_bound, 3),  # a large batch keeps drafts that still pay off
        (200, 0.8, compute_bound, 0),
    ],
)
def test_as_fast_as_the_best_width(batch: int, right: float, cost: Cost, best: int, seed: int) -> None:
    """The policy is as fast as the best fixed width, by batch size and acceptance, within a measured loss."""
    widths = settle(WidthPolicy(classes_up_to(7)), batch, right, cost, 400, seed)[4 * TRIAL_ROUNDS :]
    ideal = rate([best], batch, right, cost)
    assert ideal == max(rate([width], batch, right, cost) for width in {*widths, best})
    assert rate(widths, batch, right, cost) > 0.95 * ideal


def test_every_width_is_timed_before_one_is_judged() -> None:
    widths = settle(WidthPolicy(classes_up_to(5)), 8, 0.0, compute_bound, 5 * TRIAL_ROUNDS)
    assert (
        widths[: 4 * TRIAL_ROUNDS]
        == [5] * TRIAL_ROUNDS + [3] * TRIAL_ROUNDS + [1] * TRIAL_ROUNDS + [0] * TRIAL_ROUNDS
    )


def test_the_policy_adapts_to_changes() -> None:
    """Texts become easier to guess and contexts make rounds slower: the policy adapts both ways without a restart."""
    policy = WidthPolicy(classes_up_to(5))
    assert usual(settle(policy, 8, 0.1, memory_bound)) in (0, 1)
    assert usual(settle(policy, 8, 0.95, memory_bound, 800)) == 5
    assert usual(settle(policy, 8, 0.95, compute_bound, 800)) == 0


def test_the_unseen_is_looked_at_again() -> None:
    policy = WidthPolicy(classes_up_to(3))
    widths = settle(policy, 9, 0.0, compute_bound, 20 * REFRESH_ROUNDS)
    assert 10 <= sum(width > 0 for width in widths[REFRESH_ROUNDS:]) <= 25


def test_batch_sizes_do_not_disturb_each_other() -> None:
    policy = WidthPolicy(classes_up_to(5))
    assert usual(settle(policy, 64, 0.9, compute_bound)) == 0
    assert usual(settle(policy, 2, 0.9, memory_bound)) == 5
    assert usual(settle(policy, 127, 0.9, compute_bound, 4 * DECISION_ROUNDS)) == 0, "as timed with 64"


def test_single_requests_are_timed_on_their_own() -> None:
    policy = WidthPolicy(classes_up_to(5))
    for _ in range(TRIAL_ROUNDS):
        policy.observe(2, 5, [5, 5], 1.0)
    assert [policy.choose(batch) for batch in (1, 2, 3, 4)] == [5, 3, 3, 5]


def test_a_round_that_was_held_up_does_not_turn_the_choice() -> None:
    policy = WidthPolicy(classes_up_to(3))
    settle(policy, 4, 0.9, memory_bound)
    policy.observe(4, 3, [3] * 4, 100.0)
    assert settle(policy, 4, 0.9, memory_bound, 40).count(3) > 35


def test_a_late_round_changes_nothing() -> None:
    """Results are read one round late: they are counted, but do not affect a width chosen since."""
    policy = WidthPolicy(classes_up_to(3))
    for _ in range(TRIAL_ROUNDS):
        policy.observe(4, 3, [0] * 4, 1.0)
    assert policy.choose(4) == 1
    policy.observe(4, 3, [0] * 4, 1.0)
    assert policy.choose(4) == 1


def test_the_chance_of_a_place_is_that_of_those_that_reached_it() -> None:
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.observe(3, [3, 1, 1, 0])
    assert acceptance.tokens(0) == 1
    assert acceptance.tokens(3) == pytest.approx(1 + 3 / 4 + 1 / 4 + 1 / 4, rel=0.02)
    for _ in range(3):
        acceptance.observe(3, [])
    assert acceptance.tokens(1) == pytest.approx(1.75, rel=0.02)


@given(st.integers(1, 31), st.integers(1, 300), st.data())
def test_every_choice_has_graphs(steps: int, max_running: int, data: st.DataObject) -> None:
    """Whatever was observed, the chosen width exists and is captured for the batch; the widest is `steps`."""
    classes = classes_up_to(steps)
    captured, policy = batches_of(classes, max_running), WidthPolicy(classes)
    assert max(captured) == steps
    observations = st.tuples(st.integers(1, max_running), st.floats(0, 1e6), st.integers(0, 31))
    for batch, seconds, right in data.draw(st.lists(observations, max_size=60)):
        width = policy.choose(batch)
        smallest, largest = captured[width]
        assert smallest <= batch <= largest
        policy.observe(batch, width, [min(right, width)] * batch, seconds)


def test_what_is_captured_for_each_width() -> None:
    classes = classes_up_to(5)
    assert batches_of(classes, 48) == {5: (1, 31), 3: (1, 48), 1: (1, 48), 0: (8, 48)}
    assert batches_of(classes, 4) == {5: (1, 4), 3: (1, 4), 1: (1, 4)}
    assert batches_of(classes_up_to(2), 40) == {2: (1, 40), 1: (1, 40), 0: (8, 40)}
    assert batches_of(classes_up_to(9), 8) == {
        9: (1, 7),
        7: (1, 7),
        5: (1, 8),
        3: (1, 8),
        1: (1, 8),
        0: (8, 8),
    }


def test_places_that_are_not_tried_are_forgotten() -> None:
    """They are then estimated from the places before them, so a wider chain is tried again once those are right."""
    acceptance = Acceptance(3)
    for _ in range(50):
        acceptance.observe(3, [1, 1])
    assert acceptance.tokens(3) < 2.1
    for _ in range(3000):
        acceptance.observe(1, [1, 1])
    assert acceptance.tokens(3) > 3.5


@pytest.mark.parametrize("held_up", [{1, 2}, {1, 3}, {2, 3}], ids=str)
def test_slow_trials_do_not_decide(held_up: set[int]) -> None:
    """Of the trials of a width the fastest one counts, whichever it was."""
    policy = WidthPolicy(classes_up_to(3))
    for number in range(1, 2 * TRIAL_ROUNDS + 1):
        width = policy.choose(4)
        policy.observe(4, width, [width] * 4, 10.0 if number in held_up else 1.0)
    assert policy.choose(4) == 3


def test_a_width_that_no_longer_pays_is_left_before_others_are_timed_again() -> None:
    policy = WidthPolicy(classes_up_to(3))
    settle(policy, 4, 1.0, memory_bound, 4 * TRIAL_ROUNDS + 2 * DECISION_ROUNDS)
    assert policy.choose(4) == 3
    widths = settle(policy, 4, 0.0, compute_bound, 3 * DECISION_ROUNDS)
    assert widths[-1] < 3
