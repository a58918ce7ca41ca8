"""Stations of attempts, and which faults hit which requests."""

from __future__ import annotations

from tests.chaos.stations import Attempt, Stations, hits
from tests.chaos.test_check import ROOM, events


def test_a_request_passes_every_station() -> None:
    stations, seen = Stations(), list[str]()
    for event in events():
        stations.follow(event)
        seen += [each for each in stations.at("decode-0") if each not in seen]
    assert seen == ["queued", "computing", "transfer", "accepted", "streaming", "finished"]
    assert stations.attempts == {}


def test_an_attempt_needs_its_processes_and_the_links_between_them() -> None:
    attempt = Attempt(ROOM, "r", "prefill-0", "decode-1")
    needed = ("router", "prefill-0", "decode-1", "router-prefill-0", "prefill-0-decode-1-peer")
    others = (
        "prefill-1",
        "decode-0",
        "router-decode-0",
        "prefill-0-decode-0-bulk",
        "prefill-1-decode-1-peer",
    )
    assert [attempt.touches(each) for each in needed] == [True] * 5
    assert [attempt.touches(each) for each in others] == [False] * 5


def test_faults_are_counted_by_what_they_hit() -> None:
    faults = [(5.0, "kill", "decode-0"), (10.055, "kill", "prefill-0"), (10.22, "reset", "router-decode-0")]
    assert hits(events(), faults) == {"kill": {"idle": 1, "computing": 1}, "reset": {"streaming": 1}}
