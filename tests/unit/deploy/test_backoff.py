"""Delays before a process is restarted."""

from __future__ import annotations

from deploy.backoff import FIRST_DELAY, MAX_DELAY, STABLE_SECONDS, Backoff


def test_the_delay_doubles_up_to_a_limit() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay(0.0) for _ in range(10_000)]
    assert delays[:9] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert set(delays[9:]) == {MAX_DELAY}


def test_a_process_that_stayed_up_begins_anew() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay(0.0)
    assert backoff.next_delay(STABLE_SECONDS - 0.1) > FIRST_DELAY
    assert backoff.next_delay(STABLE_SECONDS) == FIRST_DELAY
    assert backoff.next_delay(0.0) == 2 * FIRST_DELAY
