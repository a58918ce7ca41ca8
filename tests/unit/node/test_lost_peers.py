"""A peer counts as lost once all routers that serve the node have reported it."""

from __future__ import annotations

from common.node.lost_peers import KEPT, LostPeers
from common.node.to_router import NoRouter

A, B, C = NoRouter(), NoRouter(), NoRouter()


def test_the_only_router_decides() -> None:
    peers = LostPeers()
    assert peers.report(A, "p", [A])
    assert not peers


def test_all_registered_routers_have_to_agree() -> None:
    peers = LostPeers()
    assert not peers.report(A, "p", [A, B])
    assert not peers.report(A, "p", [A, B])
    assert not peers.report(B, "q", [A, B])
    assert peers.report(B, "p", [A, B])
    assert len(peers) == 1


def test_a_router_that_uses_the_peer_again_has_withdrawn_its_report() -> None:
    peers = LostPeers()
    assert not peers.report(A, "p", [A, B])
    peers.withdraw(A, "p")
    peers.withdraw(A, "unknown")
    assert not peers.report(B, "p", [A, B])
    assert peers.report(A, "p", [A, B])


def test_without_the_router_that_disagreed_the_peer_is_lost() -> None:
    peers = LostPeers()
    assert not peers.report(A, "p", [A, B, C])
    assert not peers.report(B, "p", [A, B, C])
    assert not peers.report(C, "q", [A, B, C])
    assert peers.forget_router(C, [A, B]) == ["p"]
    assert not peers


def test_the_last_router_takes_its_reports_along() -> None:
    peers = LostPeers()
    assert not peers.report(A, "p", [A, B])
    assert peers.forget_router(A, [B]) == []
    assert peers.forget_router(B, []) == []
    assert not peers


def test_reports_are_bounded() -> None:
    peers = LostPeers()
    for number in range(3 * KEPT):
        assert not peers.report(A, str(number), [A, B])
    assert len(peers) == KEPT
    assert peers.report(B, str(3 * KEPT - 1), [A, B])
    assert not peers.report(B, "0", [A, B])
