"""Gaps between tokens: those of a step are observed once, with the number of requests that share them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from decode_node.report import TokenGaps


def request(drawn_at: float) -> Any:
    return SimpleNamespace(drawn_at=drawn_at)


def test_requests_that_take_part_in_every_step_share_its_gap() -> None:
    gaps, requests = TokenGaps(), [request(99.5) for _ in range(3)]
    for now in (100.0, 100.25, 100.5):
        for each in requests:
            gaps.drawn(each, now)
        gaps.step_ended(now)
    assert sum(gaps.seconds.counts) == 9
    assert gaps.seconds.sum == 3 * 0.5 + 6 * 0.25


def test_a_request_that_pauses_or_joins_has_a_gap_of_its_own() -> None:
    gaps, steady, late = TokenGaps(), request(99.75), request(97.0)
    for now in (100.0, 100.25):
        gaps.drawn(steady, now)
        gaps.step_ended(now)
    gaps.drawn(steady, 100.5)
    gaps.drawn(late, 100.5)
    gaps.step_ended(100.5)
    assert gaps.seconds.sum == 3 * 0.25 + 3.5
    assert sum(gaps.seconds.counts) == 4


def test_a_step_without_tokens_ends_no_gap() -> None:
    gaps, one = TokenGaps(), request(1.0)
    gaps.drawn(one, 2.0)
    gaps.step_ended(2.0)
    gaps.step_ended(3.0)
    gaps.drawn(one, 4.0)
    gaps.step_ended(4.0)
    assert gaps.seconds.sum == 1.0 + 2.0
