"""A connection that the network has dropped without a word: neither end is told, and the next message must arrive."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from common.ipc import Dealer, RouterSocket, channel
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import until
from tests.fakes.wire import Wire


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context[zmq.Socket[bytes]]()
    yield made
    made.term()


def test_a_peer_that_once_speaks_garbage_is_dialled_again(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """One flipped byte ends a connection of ZMQ's for ever: it connects anew after errors of the network only."""
    with closing(socket.create_server(("127.0.0.1", 0))) as garbage:
        port = garbage.getsockname()[1]
        dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"peer", security=Keyless())
        with closing(dealer):
            connection = garbage.accept()[0]
            connection.recv(10)
            connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL" + bytes(48))
            until(lambda: len(connection.recv(200)) > 0 and connection.recv(200))
            connection.sendall(b"\x04\xff" + b"garbage" * 40)
            assert dealer.send(b"still here")
            until(lambda: not connection.recv(65536))
            connection.close()
            garbage.close()
            with closing(RouterSocket(context, f"tcp://127.0.0.1:{port}", Keyless())) as router:
                assert until(lambda: dealer.drain() or router.drain()) == [(b"peer", b"still here")]


def test_a_connection_that_goes_silent_is_made_anew(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RELIABILITY.md, 14: both ends notice by ZMQ's heartbeats, without traffic of ours."""
    assert channel.HEARTBEAT_MS < channel.HEARTBEAT_TIMEOUT_MS <= 3_000
    monkeypatch.setattr(channel, "HEARTBEAT_MS", 20)
    monkeypatch.setattr(channel, "HEARTBEAT_TIMEOUT_MS", 100)
    monkeypatch.setattr(channel, "LINGER_MS", 0)
    with closing(RouterSocket(context, "tcp://127.0.0.1:0", Keyless())) as router:
        with closing(Wire(int(router.address.rpartition(":")[2]))) as wire:
            with closing(
                Dealer(context, f"tcp://127.0.0.1:{wire.port}", b"peer", security=Keyless())
            ) as dealer:
                dealer.send(b"before")
                assert until(router.drain)[0] == (b"peer", b"before")
                wire.cut()
                assert dealer.send(b"afterwards")
                assert until(lambda: dealer.drain() or router.drain()) == [(b"peer", b"afterwards")]
                assert router.send(b"peer", b"answer")
                assert until(lambda: router.drain() or dealer.drain()) == [b"answer"]
