"""Decode nodes that cannot be reached for some time are found; those that come back in between are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prefill_node.absent_peers import ABSENT_SECONDS, LOOK_SECONDS, AbsentPeers

FIRST: Any = SimpleNamespace(identity=b"first", incarnation="f")
OTHER: Any = SimpleNamespace(identity=b"other", incarnation="o")


def test_only_a_peer_that_is_absent_all_the_time_is_gone() -> None:
    connected = {b"first": False, b"other": False}
    absent = AbsentPeers(connected.__getitem__)
    now, found = 1000.0, []
    for look in range(int(ABSENT_SECONDS / LOOK_SECONDS) + 1):
        connected[b"other"] = look == 1
        found.append(absent.look([FIRST, OTHER], now))
        now += LOOK_SECONDS
    assert found == [[], [], [], [FIRST]]
    assert absent.look([OTHER], now) == []
    assert absent.look([OTHER], now + LOOK_SECONDS) == [OTHER]


def test_peers_are_asked_once_in_a_while_and_forgotten_when_they_are_gone() -> None:
    asked: list[bytes] = []

    def reachable(identity: bytes) -> bool:
        asked.append(identity)
        return False

    absent = AbsentPeers(reachable)
    for now in (1000.0, 1000.1, 1004.9):
        assert absent.look([FIRST], now) == []
    assert asked == [b"first"]
    assert absent.look([], 1005.0) == []
    assert absent.look([FIRST], 1000.0 + ABSENT_SECONDS) == [], "it has said Hello again"
