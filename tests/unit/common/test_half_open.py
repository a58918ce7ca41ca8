"""A connection that the network has dropped without a word: neither end is told, and the next message must arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from common.ipc import Dealer, RouterSocket, channel
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import until


class Wire:
    """A TCP relay in front of `port`. What passes a connection that has been cut is swallowed; new ones work."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = [self._listener]
        self._cuts: list[threading.Event] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for each in self._cuts:
            each.set()

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            cut = threading.Event()
            self._cuts.append(cut)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink, cut), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, cut: threading.Event) -> None:
        try:
            while data := source.recv(65536):
                if not cut.is_set():
                    sink.sendall(data)
            if not cut.is_set():
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context[zmq.Socket[bytes]]()
    yield made
    made.term()


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
                assert until(lambda: dealer.send(b"behind it") and router.drain())[0] == (
                    b"peer",
                    b"behind it",
                )
                assert until(lambda: router.send(b"peer", b"answer") and dealer.drain())[0] == b"answer"
