"""Each dial of a peer has a routing id of its own, and the newest one is its route."""

from __future__ import annotations

import pytest

from common.ipc import routes
from common.ipc.routes import Routes, dial_id, peer_name


def test_later_dials_compare_greater_and_keep_the_name() -> None:
    first, second = dial_id(b"node/1"), dial_id(b"node/1")
    assert first < second
    assert peer_name(first) == peer_name(second) == b"node/1"


@pytest.mark.parametrize("chosen", [b"peer", b"a~b", b"", b"~", b"name/~12"])
def test_other_routing_ids_are_names(chosen: bytes) -> None:
    assert peer_name(chosen) == chosen


def test_the_newest_connection_is_the_route() -> None:
    table = Routes()
    assert table.to(b"peer") == b"peer"
    old, new = dial_id(b"peer"), dial_id(b"peer")
    table.heard(b"peer", new)
    table.heard(b"peer", old)
    assert table.to(b"peer") == new


def test_the_peer_that_was_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_PEERS", 2)
    table = Routes()
    ids = {name: dial_id(name) for name in (b"a", b"b", b"c")}
    for name in (b"a", b"b", b"a", b"c"):
        table.heard(name, ids[name])
    assert [table.to(name) for name in ids] == [ids[b"a"], b"b", ids[b"c"]]
