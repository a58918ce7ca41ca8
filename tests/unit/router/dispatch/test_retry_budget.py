"""How many retries the cluster allows, on a clock that the test advances."""

from __future__ import annotations

from router.dispatch.retry_budget import BURST, PER_SECOND, RetryBudget
from tests.fakes.clock import Clock


def spend(budget: RetryBudget) -> int:
    """Take all remaining retries and return their number."""
    taken = 0
    while budget.take():
        taken += 1
    return taken


def test_a_share_of_requests_and_some_per_second() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock)
    assert spend(budget) == BURST
    for _ in range(40):
        budget.request()
    assert spend(budget) == 10
    clock.now += 2
    assert spend(budget) == 2 * PER_SECOND


def test_the_saved_retry_budget_is_bounded() -> None:
    clock = Clock()
    budget = RetryBudget(1.0, clock)
    for _ in range(10 * int(BURST)):
        budget.request()
    clock.now += 3600
    assert spend(budget) == BURST
