"""The choice of rates in a search for the highest load, as a function of which rates are kept."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from deploy.bench_search import FIELDS, search_bounds
from deploy.load_generator.rate_search import Outcome, RateSearch, SearchBounds


def searched(capacity: float, bounds: SearchBounds) -> tuple[RateSearch, list[float]]:
    """Search on a server that keeps the share at rates up to `capacity`; return the search and its probes."""
    search, probed = RateSearch(bounds), []
    while (rate := search.next_rate()) is not None:
        probed.append(rate)
        search.note(rate, rate <= capacity)
    return search, probed


def test_the_rate_doubles_and_then_the_interval_is_halved() -> None:
    search, probed = searched(23.4, SearchBounds(resolution=0.05))
    assert probed == [4, 8, 16, 32, 24, 20, 22, 23]
    assert (search.kept, search.missed, search.outcome) == (23, 24, Outcome.FOUND)
    assert search.sentence == "99 % of requests kept both limits at 23/s and not at 24/s"


def test_the_rate_is_halved_until_one_is_kept() -> None:
    search, probed = searched(1.3, SearchBounds(resolution=0.2))
    assert probed == [4, 2, 1, 1.5, 1.25]
    assert (search.kept, search.missed, search.outcome) == (1.25, 1.5, Outcome.FOUND)


@pytest.mark.parametrize("capacity", [0.3, 1, 4, 5.5, 63.7, 500])
@pytest.mark.parametrize("resolution", [0.02, 0.1, 0.5])
def test_the_capacity_lies_between_both_rates(capacity: float, resolution: float) -> None:
    search, probed = searched(capacity, SearchBounds(resolution=resolution, probes=40))
    assert search.kept is not None
    assert search.missed is not None
    assert search.kept <= capacity < search.missed <= search.kept * (1 + resolution)
    assert len(set(probed)) == len(probed), "no rate is probed twice"


def test_a_server_that_keeps_the_highest_rate_is_told_so() -> None:
    search, probed = searched(1e9, SearchBounds(start=4, highest=20))
    assert probed == [4, 8, 16, 20]
    assert (search.kept, search.outcome) == (20, Outcome.ABOVE)
    assert "even at 20/s, the highest rate allowed" in search.sentence
    assert "--max-rate" in search.sentence


def test_a_server_that_misses_the_lowest_rate_is_told_so() -> None:
    search, probed = searched(0, SearchBounds(start=4, lowest=1.5))
    assert probed == [4, 2, 1.5]
    assert (search.kept, search.outcome) == (None, Outcome.BELOW)
    assert "even at 1.5/s, the lowest rate allowed: lower --min-rate" in search.sentence


@pytest.mark.parametrize(("capacity", "said"), [(23.4, "at 20/s and not at 24/s"), (0, "no rate that was")])
def test_probes_are_bounded(capacity: float, said: str) -> None:
    search, probed = searched(capacity, SearchBounds(lowest=0.001, probes=6))
    assert len(probed) == 6
    assert search.outcome is Outcome.PROBES
    assert said in search.sentence
    assert "raise --max-probes" in search.sentence


def test_the_last_probe_may_find_the_rate() -> None:
    assert searched(23.4, SearchBounds(probes=8))[0].outcome is Outcome.FOUND


def test_a_search_that_the_server_ended_says_why() -> None:
    search = RateSearch(SearchBounds())
    search.note(4, True)
    search.note(8, False)
    assert search.sentence.startswith("the search goes on")
    search.end(Outcome.FAILED, "every request failed at 8/s: status 500")
    assert search.next_rate() is None
    assert search.sentence == (
        "the search ended early: every request failed at 8/s: status 500. "
        "99 % of requests kept both limits at 4/s and not at 8/s"
    )


@pytest.mark.parametrize("share", [0, -1, 1.01, 99, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="--share: .* such as 0.99"):
        SearchBounds(share=share)


def test_the_first_rate_must_be_allowed() -> None:
    with pytest.raises(
        ConfigError, match=r"--rate: a search cannot begin with 4/s, outside --min-rate \(5\)"
    ):
        SearchBounds(lowest=5)


def test_bounds_follow_from_the_length_of_a_run_and_the_first_rate() -> None:
    none = dict.fromkeys(FIELDS)
    assert search_bounds(none, [], 60) == SearchBounds()
    assert search_bounds(none, [], 3) == SearchBounds(start=5, lowest=5)
    assert search_bounds(none, [0.01], 60) == SearchBounds(start=0.01, lowest=0.01)
    assert search_bounds(none, [2000], 60) == SearchBounds(start=2000, highest=2000)
    given = {"--share": 0.9, "--min-rate": 1, "--max-rate": 3, "--resolution": 0.1, "--max-probes": 5}
    assert search_bounds(given, [], 60) == SearchBounds(0.9, 3, 1, 3, 0.1, 5)
