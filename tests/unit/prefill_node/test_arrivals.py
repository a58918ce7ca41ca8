"""Recent arrivals: how many shorter prompts come, in bounded memory."""

from __future__ import annotations

import pytest

from prefill_node.arrivals import KEPT, MIN_SECONDS, WINDOW, RecentArrivals
from tests.fakes.node_cluster import NodeCluster
from tests.fakes.scenarios import prompt_of


def test_only_shorter_prompts_of_the_last_seconds_count() -> None:
    recent = RecentArrivals()
    assert recent.shorter_per_ms(100, 5.0) == 0.0
    for at, tokens in ((0.0, 10), (WINDOW, 10), (WINDOW + 1, 99), (WINDOW + 1, 100)):
        recent.add(tokens, at)
    assert recent.shorter_per_ms(100, WINDOW + 2) == pytest.approx(2 / (1e3 * WINDOW))
    assert recent.shorter_per_ms(5, WINDOW + 2) == 0.0


def test_a_burst_counts_by_the_time_that_it_covers() -> None:
    recent = RecentArrivals()
    for number in range(2 * KEPT):
        recent.add(10, 0.1 * number)
    now = 0.1 * (2 * KEPT - 1)
    assert recent.shorter_per_ms(100, now) == pytest.approx(0.01, rel=0.05)
    assert recent.shorter_per_ms(100, now + 3.2) == pytest.approx(64 / 9_500, rel=0.05), "it has ended"


def test_prompts_that_arrive_at_once_count_as_those_of_a_second() -> None:
    recent = RecentArrivals()
    for _ in range(KEPT):
        recent.add(10, 5.0)
    for later in (0.0, 0.001, MIN_SECONDS):
        assert recent.shorter_per_ms(100, 5.0 + later) == pytest.approx(KEPT / (1e3 * MIN_SECONDS))


def test_cached_tokens_of_a_prompt_do_not_count() -> None:
    with NodeCluster() as cluster:
        prompt = prompt_of(100)
        for length in (96, 100):
            cluster.submit(prompt[:length], 2)
            cluster.run()
            cluster.settle()
        recent, now = cluster.prefill.node.queues.arrivals, cluster.clock.now
        each = 1 / (1e3 * WINDOW)
        assert recent.shorter_per_ms(50, now) == pytest.approx(each), "most of the second prompt is cached"
        assert recent.shorter_per_ms(97, now) == pytest.approx(2 * each)
