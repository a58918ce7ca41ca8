"""Two routers share a pair of nodes: what happens to one of them, or what it says, concerns its own requests only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages.node_inbox import Abort, PeerLost, Rejected
from common.messages.router_inbox import Failed
from tests.fakes.node_cluster import Call, NodeCluster, PrefillSide, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

TWO = Shape(routers=2)


def _both(cluster: NodeCluster, answer: int = 30) -> list[Call]:
    calls = [cluster.submit(prompt_of(40, number), answer, router=number % 2) for number in range(4)]
    cluster.run(until=lambda: len(cluster.decode.node.queues.running) == len(calls))
    return calls


def test_each_answer_goes_to_the_router_that_asked() -> None:
    with NodeCluster(TWO) as cluster:
        calls = _both(cluster, 12)
        heard: dict[int, set[int]] = {0: set(), 1: set()}
        for side in (cluster.prefill, cluster.decode):
            for number, link in enumerate(side.links):
                taken = link.taken

                def noted(number: int = number, taken: object = taken) -> list[object]:
                    messages: list[object] = taken()  # type: ignore[operator]
                    for message in messages:
                        heard[number] |= {run.room for run in getattr(message, "runs", ())}
                    return messages

                link.taken = noted  # type: ignore[method-assign, assignment]
        cluster.run()
        expect_reference(*calls)
        for number in (0, 1):
            assert heard[number] <= {call.room for call in calls if call.router == number}
            assert heard[number]
        cluster.settle()


def test_a_router_that_dies_takes_its_own_requests_along() -> None:
    with NodeCluster(TWO, resubmit=False) as cluster:
        calls = _both(cluster)
        waiting = cluster.submit(prompt_of(60, 9), 5, router=0, legs="d")
        cluster.turn(2)
        cluster.prefill.links[0].router_lost = cluster.decode.links[0].router_lost = True
        cluster.run()
        for call in (calls[0], calls[2], waiting):
            assert call.error is not None
            assert call.error.code == "node_lost"
        expect_reference(calls[1], calls[3])
        cluster.settle()


def test_the_router_that_returns_finds_the_pair_as_it_was() -> None:
    """The other router kept the nodes together: no handshake is needed, and nothing fails."""
    with NodeCluster(TWO, resubmit=False) as cluster:
        calls = _both(cluster)
        cluster.prefill.links[0].router_lost = cluster.decode.links[0].router_lost = True
        cluster.turn(3)
        failed = len(cluster.failures)
        later = cluster.submit(prompt_of(30, 2), 6, router=0)
        cluster.run(until=lambda: later.over)
        expect_reference(later)
        assert cluster.failures[failed:] == []
        assert cluster.prefill.sender.counters.handshakes == 1
        cluster.run()
        expect_reference(calls[1], calls[3])
        cluster.settle()


def test_a_router_cannot_abort_the_requests_of_another() -> None:
    with NodeCluster(TWO) as cluster:
        calls = _both(cluster)
        for side in (cluster.prefill, cluster.decode):
            side.links[0].deliver(
                *(Abort(room=call.room, reason="not mine") for call in calls if call.router)
            )
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


def test_a_router_that_refuses_a_node_does_not_end_it_for_the_other() -> None:
    """As in a rolling upgrade, whose first router speaks another version."""
    with NodeCluster(TWO, resubmit=False) as cluster:
        calls = _both(cluster)
        for side in (cluster.prefill, cluster.decode):
            side.links[0].registered = False
            side.links[0].deliver(Rejected(reason="another protocol version"))
        cluster.run(until=lambda: calls[1].over and calls[3].over)
        expect_reference(calls[1], calls[3])
        assert not cluster.prefill.node.life.stopping()
        assert not cluster.decode.node.life.stopping()


def test_a_room_that_another_router_uses_is_refused() -> None:
    """Rooms are random; if two routers ever drew the same one, the second request would be placed again."""
    with NodeCluster(TWO, resubmit=False) as cluster:
        first = cluster.submit(prompt_of(40), 30)
        cluster.run(until=lambda: len(cluster.decode.node.queues.running) == 1)
        second = cluster.submit(prompt_of(40, 1), 30, router=1, legs="")
        second.room = first.room
        cluster.send_leg(second, "d")
        cluster.decode.node.loop.turn()
        (refusal,) = [each for each in cluster.decode.links[1].taken() if isinstance(each, Failed)]
        assert refusal.room == first.room
        second.aborted = True
        cluster.run()
        expect_reference(first)
        cluster.settle()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_one_router_that_loses_a_node_ends_only_its_own_requests_there(lost: str) -> None:
    with NodeCluster(TWO, resubmit=False) as cluster:
        calls = _both(cluster)
        waits = cluster.submit(prompt_of(60, 9), 5, router=0, legs="d" if lost == "prefill" else "p")
        cluster.turn(2)
        side, other = cluster.prefill, cluster.decode
        peer = side if lost == "prefill" else other
        hears = other if lost == "prefill" else side
        hears.links[0].deliver(PeerLost(incarnation=peer.ref.incarnation))
        cluster.run()
        assert waits.error is not None
        assert waits.error.code == "node_lost"
        expect_reference(*calls)
        again = cluster.submit(prompt_of(30, 5), 6, router=0)
        cluster.run()
        expect_reference(again)
        # It used the pair again, so the report of the other router says nothing any more.
        hears.links[1].deliver(PeerLost(incarnation=peer.ref.incarnation))
        last = cluster.submit(prompt_of(30, 6), 6, router=0)
        cluster.run()
        expect_reference(last)
        assert cluster.prefill.sender.counters.handshakes == 1
        cluster.settle()


def test_a_node_that_all_routers_lost_is_lost_to_its_peers() -> None:
    with NodeCluster(replace(TWO), resubmit=False) as cluster:
        waits = cluster.submit(prompt_of(60, 9), 5, router=1, legs="d")
        cluster.turn(2)
        dead: PrefillSide = cluster.prefill
        cluster.kill(dead)
        for link in cluster.decode.links:
            link.deliver(PeerLost(incarnation=dead.ref.incarnation))
        cluster.run()
        assert waits.error is not None
        cluster.settle()
        assert cluster.decode.receiver.links == {}


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_a_router_that_never_used_a_dead_node_does_not_keep_it(dead: str) -> None:
    """As one that was restarted after the node had died: it does not know the node, so it never reports the loss."""
    with NodeCluster(TWO, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(40), 5, router=1)
        cluster.run()
        expect_reference(call)
        side, other = cluster.prefill, cluster.decode
        gone, hears = (side, other) if dead == "prefill" else (other, side)
        gone.alive = False
        hears.links[1].deliver(PeerLost(incarnation=gone.ref.incarnation))
        cluster.turn(5)
        assert not (
            cluster.decode.receiver.links if dead == "prefill" else cluster.prefill.sender.peers.all()
        )
