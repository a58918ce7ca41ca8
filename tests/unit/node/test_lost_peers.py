"""A peer counts as lost once all routers that sent requests with it have reported it."""

from __future__ import annotations

from common.node.lost_peers import KEPT, LostPeers
from common.node.to_router import NoRouter

A, B, C = NoRouter(), NoRouter(), NoRouter()


def _used_by(*routers: NoRouter) -> LostPeers:
    peers = LostPeers()
    for router in routers:
        peers.used(router, "p")
    return peers


def test_the_only_router_decides() -> None:
    peers = _used_by(A)
    assert peers.report(A, "p")
    assert not peers


def test_all_routers_that_used_the_peer_have_to_agree() -> None:
    peers = _used_by(A, B)
    assert not peers.report(A, "p")
    assert not peers.report(A, "p")
    assert peers.report(B, "p")
    assert not peers


def test_a_router_that_never_used_the_peer_has_no_say() -> None:
    """It was perhaps restarted after the peer had died, does not know the peer and will never report it."""
    peers = _used_by(A)
    peers.used(B, "q")
    assert peers.report(A, "p")
    assert not peers.report(C, "q")
    assert peers.report(B, "q")


def test_a_router_that_uses_the_peer_again_has_withdrawn_its_report() -> None:
    peers = _used_by(A, B)
    assert not peers.report(A, "p")
    peers.used(A, "p")
    assert not peers.report(B, "p")
    assert peers.report(A, "p")


def test_without_the_router_that_disagreed_the_peer_is_lost() -> None:
    peers = _used_by(A, B, C)
    peers.used(C, "q")
    assert not peers.report(A, "p")
    assert not peers.report(B, "p")
    assert peers.forget_router(C) == ["p"]
    assert not peers


def test_the_last_router_takes_its_reports_along() -> None:
    peers = _used_by(A, B)
    assert not peers.report(A, "p")
    assert peers.forget_router(A) == []
    assert peers.forget_router(B) == []
    assert not peers


def test_what_is_known_is_bounded() -> None:
    peers = LostPeers()
    for number in range(3 * KEPT):
        peers.used(A, str(number))
        assert not peers.report(B, str(number))
    assert len(peers) == KEPT
    assert peers.report(A, str(3 * KEPT - 1))
