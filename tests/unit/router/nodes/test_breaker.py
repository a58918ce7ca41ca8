"""Circuit breakers on a clock that the test advances."""

from __future__ import annotations

from router.nodes.breaker import BreakerLimits, Breakers
from tests.fakes.clock import Clock

LIMITS = BreakerLimits(failures=3, window=10.0, first_pause=1.0, longest_pause=4.0, trial=5.0)


def opened(clock: Clock) -> Breakers[str]:
    breakers: Breakers[str] = Breakers(LIMITS, clock)
    for _ in range(3):
        breakers.failed("a")
    assert breakers.blocked() == {"a"}
    return breakers


def test_it_opens_after_enough_failures_within_the_window() -> None:
    clock = Clock()
    breakers: Breakers[str] = Breakers(LIMITS, clock)
    for _ in range(9):
        breakers.failed("a")
        clock.now += 5.5
        assert breakers.blocked() == set()
    breakers.failed("b")
    breakers.failed("b")
    breakers.succeeded("b")
    breakers.failed("b")
    assert breakers.state("b") == "closed", "a success clears what was counted"
    breakers.failed("b")
    breakers.failed("b")
    assert (breakers.state("b"), breakers.blocked()) == ("open", {"b"})


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    breakers = opened(clock)
    breakers.succeeded("a")
    assert breakers.blocked() == {"a"}, "successes from before say nothing"
    clock.now += 1
    assert (breakers.state("a"), breakers.blocked()) == ("half-open", set())
    assert (breakers.is_half_open("a"), breakers.is_half_open("b")) == (True, False)
    breakers.placed("a", 1)
    assert breakers.blocked() == {"a"}
    breakers.released("a", 1)
    assert breakers.blocked() == set(), "the trial ended without a verdict"
    breakers.placed("a", 1)
    clock.now += 5
    assert breakers.blocked() == set(), "the trial takes too long"
    breakers.succeeded("a")
    assert breakers.state("a") == "closed"


def test_a_request_from_before_ends_no_trial() -> None:
    """A node may have hundreds of them, and each would let another request follow the trial."""
    clock = Clock()
    breakers = opened(clock)
    clock.now += 1
    breakers.placed("a", 2)
    breakers.released("a", 1)
    assert breakers.blocked() == {"a"}
    breakers.released("a", 2)
    assert breakers.blocked() == set()


def test_keys_that_never_failed_take_no_memory() -> None:
    breakers: Breakers[str] = Breakers(LIMITS, Clock())
    breakers.placed("a", 1)
    breakers.released("a", 1)
    breakers.succeeded("a")
    assert breakers.states == {}
    breakers.failed("a")
    breakers.placed("a", 1)
    assert breakers.blocked() == set(), "one failure makes no trial of the next request"


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    breakers = opened(clock)
    for pause in (2.0, 4.0, 4.0):
        clock.now += 10
        breakers.placed("a", 1)
        breakers.failed("a")
        breakers.failed("a")  # for a request that was placed before
        clock.now += pause - 0.01
        assert breakers.blocked() == {"a"}
        clock.now += 0.01
        assert breakers.blocked() == set()


def test_breakers_of_lost_nodes_are_forgotten() -> None:
    breakers = opened(Clock())
    breakers.forget(lambda key: key == "a")
    assert breakers.blocked() == set()
    assert breakers.state("a") == "closed"
