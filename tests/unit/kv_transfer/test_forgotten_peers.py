"""Grants that reach a prefill node which was told that their decode node is gone: it was stopped and goes on.

Its router loses a decode node that is stopped (SIGSTOP) and says so to the prefill nodes, which detach it. When it
continues it grants pages for requests that it has, before it learns that its router had lost it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator

import pytest

from common.errors import NodeLost
from kv_transfer.events import Arrived, PagesFree, PeerForgot, PeerRefused, ReceiverEvent, RoomFailed
from kv_transfer.transport.base import ReceiverEndpoint, SenderEndpoint
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.receiver import TcpReceiver
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.waiting import until
from tests.unit.kv_transfer.rig import LIMITS, Clock, Decode, Prefill, same_pages, send_all

SRC = (2, 3, 5)


def pages_of(room: int) -> tuple[int, ...]:
    """Return the pages on the decode node."""
    return tuple(range(3 * room, 3 * room + 3))


class Pair:
    """A prefill and a decode node after their handshake, over a wire that keeps the order of frames."""

    def __init__(self, transport: str) -> None:
        clock, incarnation = Clock(), secrets.token_hex(16)
        tcp = transport == "tcp"
        sending: SenderEndpoint = TcpSender(LIMITS, clock) if tcp else ShmSender()
        taking: ReceiverEndpoint = (
            TcpReceiver("127.0.0.1", 0, LIMITS, clock=clock) if tcp else ShmReceiver(incarnation)
        )
        self.prefill = Prefill(clock, sending)
        self.decode = Decode(clock, taking, incarnation=incarnation)
        self.wire: deque[bytes] = deque()  # to the prefill node
        self.events: list[ReceiverEvent] = []
        self.greet()
        self.turn()

    def greet(self) -> None:
        self.decode.connect(self.prefill, self.wire.append)

    def open(self, room: int) -> None:
        self.decode.receiver.open(room, (self.prefill.incarnation,), pages_of(room), 0)

    def turn(self) -> None:
        """Let both sides process what has arrived, the prefill node first."""
        while self.wire:
            self.prefill.sender.handle(self.decode.identity, self.wire.popleft())
        self.prefill.poll()
        self.events += self.decode.poll()

    def serve(self, room: int) -> None:
        """Send the pages of a room that was opened or will be granted by what is on the wire."""
        self.prefill.sender.expect(room)
        self.turn()
        self.turn()
        send_all(self.prefill, room, SRC)

        def arrived() -> bool:
            self.turn()
            return any(isinstance(each, Arrived) and each.room == room for each in self.events)

        until(arrived)
        assert same_pages(self.prefill, SRC, self.decode, pages_of(room))
        self.decode.receiver.close(room)

    def told_of_its_loss(self) -> None:
        """Let the prefill node hear from its router that the decode node is gone."""
        self.prefill.sender.peer_lost(self.decode.incarnation)

    def left(self) -> tuple[int, int, int]:
        """Return what would be leaked: rooms of either side, and quarantined pages."""
        return self.prefill.sender.active, self.decode.receiver.active, self.decode.receiver.quarantined_pages


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.prefill.sender.close()
    made.decode.receiver.shutdown()


def test_a_forgotten_node_greets_again_and_nothing_is_refused(pair: Pair) -> None:
    pair.told_of_its_loss()
    pair.open(1)
    pair.open(2)
    pair.turn()
    pair.turn()
    assert [each for each in pair.events if isinstance(each, PeerRefused)] == []
    assert [each for each in pair.events if isinstance(each, PeerForgot)] == [
        PeerForgot(pair.prefill.incarnation)
    ]
    failed = [each for each in pair.events if isinstance(each, RoomFailed)]
    assert {each.room: each.code for each in failed} == {1: NodeLost.code, 2: NodeLost.code}
    assert {each.room for each in pair.events if isinstance(each, PagesFree)} == {1, 2}
    assert pair.left() == (0, 0, 0)
    pair.greet()
    pair.open(3)
    pair.serve(3)
    assert pair.left() == (0, 0, 0)


def test_an_answer_to_an_earlier_grant_does_not_refuse_a_later_greeting(pair: Pair) -> None:
    pair.told_of_its_loss()
    pair.open(1)
    # It notices that its router had lost it: every prefill node is greeted again.
    pair.decode.receiver.peer_lost(pair.prefill.incarnation)
    pair.greet()
    pair.open(2)
    pair.serve(2)
    assert [each for each in pair.events if isinstance(each, PeerRefused | PeerForgot)] == []
    assert [each.room for each in pair.events if isinstance(each, RoomFailed)] == [1]
    assert pair.left() == (0, 0, 0)
