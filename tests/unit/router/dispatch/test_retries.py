"""When a failed request is placed again, by given times and random values."""

from __future__ import annotations

import pytest

from common.errors import InternalError, Moved, NodeLost, Overloaded, Preempted, TransferFailed
from router.dispatch.retries import LOSSES_PER_ATTEMPT, Retries


def retries(max_attempts: int = 9, timeout: float = 10.0, deadline: float = 600.0) -> Retries:
    return Retries(max_attempts, timeout, deadline, draw=lambda low, high: high)


def test_the_first_retry_is_immediate_if_another_pair_can_take_it() -> None:
    assert retries().pause(TransferFailed("x"), False, True, 0.0) == 0.0
    assert retries().pause(TransferFailed("x"), False, False, 0.0) == 0.05


def test_further_retries_are_spaced_and_bounded() -> None:
    made = retries()
    pauses = [made.pause(TransferFailed("x"), False, True, 0.0) for _ in range(9)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, None]


def test_pauses_are_drawn() -> None:
    asked: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    made = Retries(3, 10.0, 600.0, draw)
    assert made.pause(TransferFailed("x"), False, False, 0.0) == 0.025
    assert asked == [(0.5, 1.0)]


def test_never_after_the_deadline() -> None:
    made = retries(deadline=5.0)
    assert made.pause(TransferFailed("x"), False, False, 4.96) is None
    assert retries(deadline=5.0).pause(TransferFailed("x"), False, True, 5.0) is None


def test_errors_that_another_attempt_cannot_fix_are_not_retried() -> None:
    assert retries().pause(InternalError("x"), False, True, 0.0) is None


@pytest.mark.parametrize("error", [Preempted("x"), NodeLost("x")])
def test_progress_is_no_failure(error: Preempted | NodeLost) -> None:
    made = retries(max_attempts=2)
    pauses = [made.pause(error, True, False, 0.0) for _ in range(2 * LOSSES_PER_ATTEMPT)]
    assert pauses[:-1] == [0.0] * (len(pauses) - 1)
    assert (pauses[-1] is None) == isinstance(error, NodeLost), "nodes that die under a request are bounded"
    assert retries(max_attempts=1).pause(TransferFailed("x"), True, True, 0.0) is None


@pytest.mark.parametrize("error", [Preempted("x"), NodeLost("x")])
def test_without_progress_lost_nodes_and_preemptions_are_failures(error: Preempted | NodeLost) -> None:
    made = retries(max_attempts=3)
    assert [made.pause(error, False, True, 0.0) for _ in range(3)] == [0.0, 0.1, None]


def test_only_repeated_failures_are_charged_to_the_budget() -> None:
    made = retries()
    assert not made.repeated
    charged = []
    for error in (TransferFailed("x"), TransferFailed("x"), NodeLost("x"), TransferFailed("x"), Moved("x")):
        made.pause(error, False, True, 0.0)
        charged.append(made.repeated)
    assert charged == [False, True, False, True, False]
    made.pause(Preempted("x"), True, True, 0.0)
    made.pause(TransferFailed("x"), False, True, 0.0)
    assert not made.repeated, "the first one after progress"


def test_a_prompt_that_is_moved_has_not_failed() -> None:
    made = retries(max_attempts=2)
    assert [made.pause(Moved("x"), False, False, 0.0) for _ in range(5)] == [0.0] * 5
    assert not made.repeated
    assert made.pause(TransferFailed("x"), False, True, 0.0) == 0.0
    assert retries(deadline=5.0).pause(Moved("x"), False, True, 5.0) is None


def test_a_full_queue_refuses_new_requests_and_delays_others() -> None:
    made = retries(timeout=2.0)
    assert made.pause(Overloaded("x"), False, False, 0.0) is None, "a new request is refused"
    made = retries(timeout=2.0)
    made.pause(Preempted("x"), True, False, 0.0)
    assert [made.pause(Overloaded("x"), False, False, now) for now in (1.0, 1.5, 2.0)] == [0.25, 0.5, 1.0]
    assert made.pause(Overloaded("x"), False, False, 2.5) is None, "after two seconds its timeout is over"
    made.pause(Preempted("x"), True, False, 3.0)
    assert made.pause(Overloaded("x"), False, False, 4.0) == 0.25, "each wait begins anew"


def test_a_request_leaves_a_full_queue_for_another_node() -> None:
    made = retries(max_attempts=3)
    assert made.pause(Overloaded("x"), False, True, 0.0) == 0.0
    assert not made.repeated
    assert made.pause(Overloaded("x"), False, True, 0.0) == 0.0
    assert made.repeated, "the second one is charged to the budget"
    assert made.pause(Overloaded("x"), False, True, 0.0) is None, "a new request is refused in the end"
    made = retries()
    assert made.pause(Overloaded("x"), False, True, 0.0) == 0.0
    assert made.pause(Overloaded("x"), False, False, 0.0) is None, "all queues are full"


def test_a_request_that_was_taken_in_looks_elsewhere_before_it_waits() -> None:
    made = retries(timeout=2.0)
    made.pause(NodeLost("x"), True, True, 0.0)
    assert made.pause(Overloaded("x"), False, True, 1.0) == 0.0
    assert made.pause(Overloaded("x"), False, False, 1.0) == 0.25
    assert not made.repeated
