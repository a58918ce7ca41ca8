"""Connections that never finish their handshake are bounded, and honest peers still get through."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from common.ipc import Dealer, RouterSocket, channel, handshake_guard
from common.ipc.curve import Curve
from common.ipc.handshake_guard import (
    HANDSHAKE_BYTES,
    HANDSHAKE_SECONDS,
    KernelConnections,
    OpenHandshakes,
    Peer,
)
from common.ipc.key_files import make_key_pairs
from tests.fakes.clock import Clock
from tests.fakes.descriptors import open_descriptors
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import PATIENCE, until


class Kernel:
    """A fake kernel: connections by descriptor."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self.bytes: dict[int, int] = {}
        self.ended: list[int] = []

    def peer(self, descriptor: int) -> Peer | None:
        return self.peers.get(descriptor)

    def received(self, descriptor: int, peer: Peer) -> int | None:
        return self.bytes.get(descriptor, 0) if self.peers.get(descriptor) == peer else None

    def end(self, descriptor: int, peer: Peer) -> None:
        assert self.peers[descriptor] == peer
        self.ended.append(descriptor)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handshakes(kernel: Kernel, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> OpenHandshakes:
    monkeypatch.setattr(handshake_guard, "MAX_HANDSHAKES", 5)
    monkeypatch.setattr(handshake_guard, "MAX_HANDSHAKES_PER_SOURCE", 3)
    return OpenHandshakes(kernel, clock)


def accept(handshakes: OpenHandshakes, kernel: Kernel, descriptor: int, source: str) -> None:
    kernel.peers[descriptor] = (source, 1000 + descriptor)
    handshakes.accepted(descriptor)


def test_the_oldest_of_a_source_ends_first(handshakes: OpenHandshakes, kernel: Kernel) -> None:
    accept(handshakes, kernel, 1, "10.0.0.1")
    for descriptor in range(2, 7):
        accept(handshakes, kernel, descriptor, "10.0.0.2")
    assert kernel.ended == [2, 3]
    assert len(handshakes) == 4


def test_the_oldest_of_all_ends_where_sources_are_many(handshakes: OpenHandshakes, kernel: Kernel) -> None:
    for descriptor in range(8):
        accept(handshakes, kernel, descriptor, f"10.0.0.{descriptor}")
    assert kernel.ended == [0, 1, 2]
    assert len(handshakes) == 5


def test_finished_closed_and_old_ones_are_not_ended(
    handshakes: OpenHandshakes, kernel: Kernel, clock: Clock
) -> None:
    for descriptor in range(3):
        accept(handshakes, kernel, descriptor, "10.0.0.1")
    kernel.bytes[0] = HANDSHAKE_BYTES
    handshakes.closed(1)
    accept(handshakes, kernel, 3, "10.0.0.1")
    accept(handshakes, kernel, 4, "10.0.0.1")
    assert not kernel.ended, "0 has finished its handshake, 1 is gone: three are left"
    assert len(handshakes) == 3
    clock.now += HANDSHAKE_SECONDS + 1
    for descriptor in range(5, 8):
        accept(handshakes, kernel, descriptor, "10.0.0.1")
    assert not kernel.ended, "libzmq has ended the earlier ones"


def test_a_reused_descriptor_of_another_connection_is_not_closed(
    handshakes: OpenHandshakes, kernel: Kernel
) -> None:
    for descriptor in range(3):
        accept(handshakes, kernel, descriptor, "10.0.0.1")
    kernel.peers[0] = ("10.0.0.9", 1)
    accept(handshakes, kernel, 3, "10.0.0.1")
    accept(handshakes, kernel, 4, "10.0.0.1")
    assert kernel.ended == [1]


def test_the_kernel_knows_a_connection_by_its_peer() -> None:
    connections = KernelConnections()
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        closing(socket.create_connection(listener.getsockname())) as client,
        closing(listener.accept()[0]) as server,
    ):
        descriptor, peer = server.fileno(), connections.peer(server.fileno())
        assert peer is not None
        assert peer == client.getsockname()
        client.sendall(b"x" * 300)
        assert until(lambda: connections.received(descriptor, peer)) == 300
        stranger = ("127.0.0.1", 1)
        assert connections.received(descriptor, stranger) is None
        connections.end(descriptor, stranger)
        client.sendall(b"y")
        assert until(lambda: connections.received(descriptor, peer) == 301)
        connections.end(descriptor, peer)
        client.settimeout(PATIENCE)
        assert client.recv(1) == b""
    assert connections.peer(descriptor) is None


def test_a_descriptor_that_became_something_else_is_looked_at_without_a_trace() -> None:
    """libzmq has closed the connection, and another part of the process has opened a file."""
    before = open_descriptors()
    with Path("/dev/null").open() as reused:
        assert KernelConnections().peer(reused.fileno()) is None
    # Threads that an earlier test has left may close some of their own.
    assert open_descriptors() <= before


@pytest.fixture
def curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RouterSocket, Dealer]]:
    """A listening socket with keys and a long handshake timeout, and an honest peer."""
    for module in (handshake_guard, channel):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 600.0)
    make_key_pairs(tmp_path / "keys", ("router", "decode-0"))
    with ExitStack() as stack:
        contexts = [stack.enter_context(zmq.Context[zmq.Socket[bytes]]()) for _ in range(2)]
        ours = stack.enter_context(closing(Curve(contexts[0], tmp_path / "keys", "router", ("decode-0",))))
        theirs = stack.enter_context(closing(Curve(contexts[1], tmp_path / "keys", "decode-0", ())))
        server = stack.enter_context(closing(RouterSocket(contexts[0], "tcp://127.0.0.1:*", ours)))
        honest = Dealer(contexts[1], server.address, b"decode-0/1", "router", theirs)
        yield server, stack.enter_context(closing(honest))


def test_a_flood_of_half_open_connections_keeps_no_peer_out(
    curve: tuple[RouterSocket, Dealer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_guard, "MAX_HANDSHAKES_PER_SOURCE", 20)
    server, honest = curve
    handshakes = server.handshakes
    assert handshakes is not None
    port = int(server.address.rpartition(":")[2])
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port)))) for _ in range(200)
        ]
        until(lambda: handshakes.ended >= 180)
        assert len(handshakes) <= 20
        assert honest.send(b"here")
        assert until(server.drain) == [(b"decode-0/1", b"here")]
        for stranger in strangers[:100]:
            stranger.settimeout(PATIENCE)
            while stranger.recv(64):
                pass
        assert honest.send(b"still here")
        assert until(server.drain) == [(b"decode-0/1", b"still here")]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_the_guard_and_a_watch_on_disconnects_share_one_socket(tmp_path: Path, scheme: str) -> None:
    """libzmq keeps one monitor per socket: a second one would end the guard."""
    address = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/s"
    context = zmq.Context[zmq.Socket[bytes]]()
    with closing(RouterSocket(context, address, Keyless())) as router:
        disconnects = router.disconnects
        assert not disconnects.take()
        for _ in range(2):  # also after the first was reported
            stranger = context.socket(zmq.DEALER)
            stranger.connect(router.address)
            stranger.send(b"x")
            until(lambda: router.socket.poll(100, zmq.POLLIN) and router.socket.recv_multipart())
            stranger.close(linger=0)
            until(disconnects.take)
        if scheme == "tcp":
            port = int(router.address.rpartition(":")[2])
            handshakes = router.handshakes
            assert handshakes is not None
            with closing(socket.create_connection(("127.0.0.1", port))):
                until(lambda: len(handshakes) > 0)
    context.term()
