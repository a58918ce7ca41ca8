"""What waits for a peer that takes nothing is bounded by bytes, not only by the number of messages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from common.ipc import Dealer, RouterSocket
from common.ipc.backlog import LARGE, Backlog
from tests.fakes.waiting import until

MIB = 1 << 20
ON_THE_WAY = 3  # messages that ZMQ and the kernel have taken, and the peer has not


def tracker(done: bool = False) -> Any:
    return SimpleNamespace(done=done)


def test_each_peer_has_its_own_bound() -> None:
    backlog, first = Backlog(10), tracker()
    assert backlog.admits(b"a", 99)  # nothing waits: however large
    backlog.add(b"a", first, 6)
    assert backlog.admits(b"a", 4)
    assert not backlog.admits(b"a", 5)
    assert backlog.admits(b"b", 5)
    first.done = True
    assert backlog.admits(b"a", 99)


def test_peers_are_forgotten_with_their_last_message() -> None:
    """Every incarnation of a node is a peer of its own: the table must not grow with them."""
    backlog = Backlog(10)
    for number in range(100):
        backlog.add(b"%d" % number, tracker(done=number != 7), 1)
    assert backlog.admits(b"x", 1)
    assert list(backlog._peers) == [b"7"]


@pytest.fixture
def sockets() -> Iterator[tuple[RouterSocket, Dealer, Dealer]]:
    """A router that lets 4 MiB wait, a peer that takes one message in at a time, and another."""
    context = zmq.Context[zmq.Socket[bytes]]()
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        router = RouterSocket(context, f"ipc://{Path(directory)}/r.sock", queued_bytes=4 * MIB)
        stalled, other = (
            Dealer(context, router.address, name, received=1) for name in (b"stalled", b"other")
        )
        for dealer in (stalled, other):
            assert dealer.send(b"hello")
            until(router.drain)
        yield router, stalled, other
        for socket in (router, stalled, other):
            socket.close()
        context.destroy(linger=0)


def test_bytes_that_wait_for_a_stalled_peer_are_bounded(sockets: tuple[RouterSocket, Dealer, Dealer]) -> None:
    """ARCHITECTURE.md: every queue is bounded. 10,000 messages of images would be 100 GB."""
    router, stalled, other = sockets
    taken = []

    def refused() -> bool:
        image = bytes([len(taken)]) * MIB
        if not router.send(b"stalled", image):
            return True
        taken.append(image)
        return False

    until(refused)
    assert 4 <= len(taken) <= 4 + ON_THE_WAY
    assert router.send(b"stalled", b"x" * (LARGE - 1))  # a word of control still passes
    assert router.send(b"other", taken[0])  # and others are served
    assert until(other.drain) == [taken[0]]
    got: list[bytes] = []
    until(lambda: got.extend(stalled.drain()) or got[-1:] == [b"x" * (LARGE - 1)])
    assert got[:-1] == taken
    until(lambda: router.send(b"stalled", taken[0]))
