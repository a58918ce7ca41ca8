"""The sockets of a decode rank to the ranks of a prefill node, of which requests name only rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from common.errors import HandshakeRefused, TransferFailed
from common.messages.identity import NodeRef, rank_incarnation
from decode_node import peers as module
from decode_node.peers import PeerConnections
from kv_transfer.counters import ReceiverCounters
from kv_transfer.inbound import Dial

NODE = NodeRef(name="p1", role="prefill", incarnation="1" * 32, peer_address="inproc://rank-0")
SECOND = rank_incarnation(NODE.incarnation, 1)


class DialingReceiver:
    """Names a second rank of the prefill node at once, as if rank 0 had said Welcome."""

    def __init__(self) -> None:
        self.counters = ReceiverCounters()
        self.hellos: list[str] = []
        self.lost: list[str] = []
        self.dials: dict[str, Dial] = {}
        self.refuses = False

    def connect(self, incarnation: str, send: Callable[[bytes], object], dial: Dial) -> None:
        del send
        self.hellos.append(incarnation)
        self.dials[incarnation] = dial
        self.dial_ranks(incarnation)

    def dial_ranks(self, incarnation: str) -> None:
        if self.refuses:
            raise HandshakeRefused("prefill node p1 contradicts itself")
        self.dials[incarnation](SECOND, "inproc://rank-1")
        self.hellos.append(SECOND)

    def peer_lost(self, incarnation: str) -> None:
        self.lost.append(incarnation)

    def link_lost(self, incarnation: str) -> None:
        self.lost.append(incarnation)

    def link_works(self, incarnation: str) -> None:
        pass


@pytest.fixture
def receiver() -> DialingReceiver:
    return DialingReceiver()


@pytest.fixture
def peers(receiver: DialingReceiver) -> Iterator[PeerConnections]:
    context = zmq.Context[zmq.Socket[bytes]]()
    made = PeerConnections(context, "decode-0", "d" * 32, receiver, zmq.Poller())  # type: ignore[arg-type]
    yield made
    made.close()
    context.term()


def test_the_ranks_of_a_node_are_connected_once(peers: PeerConnections, receiver: DialingReceiver) -> None:
    peers.ensure(NODE)
    peers.ensure(NODE)
    assert peers.connected == {NODE.incarnation, SECOND}
    assert receiver.hellos == [NODE.incarnation, SECOND]


def test_a_lost_rank_is_dialed_again_without_another_hello_to_rank_0(
    peers: PeerConnections, receiver: DialingReceiver
) -> None:
    peers.ensure(NODE)
    peers.lost(SECOND)
    assert receiver.lost == [SECOND]
    peers.ensure(NODE)
    assert receiver.hellos == [NODE.incarnation, SECOND, SECOND]
    peers.lost(SECOND)
    receiver.refuses = True
    with pytest.raises(TransferFailed, match="prefill node p1 contradicts itself"):
        peers.ensure(NODE)


def test_a_lost_node_is_lost_with_all_its_ranks(peers: PeerConnections, receiver: DialingReceiver) -> None:
    peers.ensure(NODE)
    peers.lost(NODE.incarnation)
    assert receiver.lost == [NODE.incarnation, SECOND]
    peers.close_unused({NODE.incarnation})
    assert peers.connected == {NODE.incarnation, SECOND}, "aborts still have to be acknowledged over both"
    peers.close_unused({SECOND})
    assert peers.connected == {SECOND}
    peers.close_unused(set())
    assert not peers.connected


def test_a_rank_that_cannot_be_reached_fails_the_request(
    peers: PeerConnections, receiver: DialingReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.ensure(NODE)
    peers.lost(SECOND)
    monkeypatch.setattr(module, "LINK_SECONDS", -1.0)
    with pytest.raises(TransferFailed, match="prefill node p1 cannot be reached from this decode node"):
        peers.ensure(NODE)
