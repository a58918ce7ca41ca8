"""The planner on a simulated cluster that is split wrongly for its load: it changes the split, once, and not back."""

from __future__ import annotations

from tests.bench.planner_simulation import SETTINGS, good, row, shifting, simulate

SECONDS, RATE = 60.0, 16.0


def test_a_planner_gives_a_load_of_long_prompts_another_prefill_node() -> None:
    requests = list(shifting(SECONDS, 1, RATE, 1))
    fixed, none = simulate(requests, {"prefill": 2, "decode": 2})
    planned, changes = simulate(requests, {"prefill": 2, "decode": 2}, SETTINGS)
    assert len(fixed) == len(planned) == len(requests), "every request was answered"
    assert (none, changes) == (0, 1)
    assert sum(map(good, planned)) > 1.5 * sum(map(good, fixed))
    figures = row("planner", "all", planned, SECONDS, changes)
    assert figures.good_share == round(sum(map(good, planned)) / len(planned), 4)
