"""Which connections may begin their TLS handshake, and when."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

import pytest

from router.server import handshakes as module
from router.server.handshakes import SLOTS, TlsHandshakes, client_hello
from tests.fakes.tls_files import AUTHORITY
from tests.fakes.waiting import PATIENCE, eventually


def hello() -> bytes:
    """Return the first message of a TLS client."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=AUTHORITY).wrap_bio(
        received, sent, server_hostname="localhost"
    )
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


class Pairs:
    """Connections of scripted clients. Used as a context."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._open:
            each.close()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The server's side of a new connection, and the client's."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        server.setblocking(False)
        self._open += [server, client]
        return server, client


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Crowd:
    """Connections that take their turns; each keeps its slot until it is let go."""

    def __init__(self, handshakes: TlsHandshakes, pairs: Pairs) -> None:
        self._handshakes = handshakes
        self._pairs = pairs
        self.begun: list[str] = []  # names of clients, in order
        self.tasks: list[asyncio.Task[None]] = []
        self._gates: list[asyncio.Event] = []

    def add(self, client: str, data: bytes) -> socket.socket:
        server, peer = self._pairs.connect()
        peer.sendall(data)
        gate = asyncio.Event()
        self._gates.append(gate)
        self.tasks.append(asyncio.create_task(self._run(server, client, gate)))
        return peer

    async def _run(self, server: socket.socket, client: str, gate: asyncio.Event) -> None:
        async with self._handshakes.turn(server, client):
            self.begun.append(client)
            await gate.wait()

    async def begun_are(self, count: int) -> None:
        await eventually(lambda: len(self.begun) >= count)
        await settle()
        assert len(self.begun) == count

    def let_go(self, number: int) -> None:
        self._gates[number].set()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_hello_is_waited_for_without_taking_it() -> None:
    whole = hello()
    with Pairs() as pairs:
        server, client = pairs.connect()
        waiting = asyncio.create_task(client_hello(server))
        for part in (whole[:1], whole[1:40], whole[40:-1]):
            client.sendall(part)
            await asyncio.sleep(0.005)
            assert not waiting.done()
        client.sendall(whole[-1:])
        await asyncio.wait_for(waiting, PATIENCE)
        assert server.recv(1 << 16) == whole


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        # a record that is larger than any may be
        b"\x16\x03\x01\xff\xff\x01\x00\xff\xfb" + bytes(100),
        # a hello in several records: what it costs would begin with a later one
        b"\x16\x03\x01\x00\x04\x01\x00\x01\x00" + bytes(100),
        # another message first
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03",
    ],
)
async def test_what_is_no_whole_hello_is_refused(sent: bytes) -> None:
    with Pairs() as pairs:
        server, client = pairs.connect()
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(client_hello(server), PATIENCE)


async def test_what_is_not_tls_does_not_wait() -> None:
    """The handshake fails at once."""
    with Pairs() as pairs:
        server, client = pairs.connect()
        client.sendall(b"G")
        await asyncio.wait_for(client_hello(server), PATIENCE)


async def test_a_few_compute_at_a_time_and_clients_take_turns() -> None:
    handshakes, first = TlsHandshakes(), hello()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        for _ in range(2 * SLOTS):
            crowd.add("many", first)
        await crowd.begun_are(SLOTS)
        crowd.add("one", first)
        # it has read the hello and waits
        await eventually(lambda: handshakes.waits("one"))
        assert handshakes.pending("many") == 2 * SLOTS
        for number in range(2):
            crowd.let_go(number)
        await crowd.begun_are(SLOTS + 2)
        # cancelled at the moment at which it gets its turn
        crowd.let_go(2)
        crowd.tasks[SLOTS + 2].cancel()
        assert sorted(crowd.begun[SLOTS:]) == ["many", "one"]
        await crowd.end()
    assert handshakes.pending("many") == 0
    assert handshakes.computing == 0


async def test_silent_connections_hold_no_slot() -> None:
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        for _ in range(2 * SLOTS):
            crowd.add("silent", b"\x16\x03")
        crowd.add("other", hello())
        await crowd.begun_are(1)
        assert crowd.begun == ["other"]
        await crowd.end()


async def test_a_handshake_that_stays_silent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while another client waits, and not before it has had its time."""
    monkeypatch.setattr(module, "SLOT_SECONDS", 0.02)
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        for _ in range(SLOTS):
            crowd.add("silent", hello())
        crowd.add("silent", hello())
        await crowd.begun_are(SLOTS)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in crowd.tasks), "no other client waits"
        crowd.add("other", hello())
        await eventually(lambda: "other" in crowd.begun)
        assert any(task.done() for task in crowd.tasks[:SLOTS])
        await crowd.end()


async def test_nobody_makes_room_for_a_connection_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLOTS", 1), ("SLOT_SECONDS", 0.02)):
        monkeypatch.setattr(module, name, value)
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        crowd.add("slow", hello())
        await crowd.begun_are(1)
        crowd.add("leaves", hello())
        await eventually(lambda: handshakes.waits("leaves"))
        crowd.tasks[1].cancel()
        await settle()
        assert not handshakes.waits("leaves")
        await asyncio.sleep(0.05)
        assert done(crowd.tasks) == [False, True]
        await crowd.end()


async def test_how_many_are_pending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        for _ in range(3):
            crowd.add("silent", b"")
            await settle()
        crowd.add("other", hello())
        await crowd.begun_are(1)
        assert done(crowd.tasks) == [True, False, False, False], "the oldest one has made room"
        await crowd.end()


async def test_connections_that_arrive_at_once_each_end_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        crowd = Crowd(handshakes, pairs)
        for _ in range(3):
            crowd.add("silent", b"")
        await settle()
        for _ in range(3):
            crowd.add("later", b"")
        await settle()
        assert done(crowd.tasks) == [True] * 3 + [False] * 3
        assert (handshakes.pending("silent"), handshakes.pending("later")) == (0, 3)
        await crowd.end()


async def test_one_that_has_made_room_still_loses_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cancellation may be under way when the time of its slot is over."""
    for name, value in (("SLOTS", 1), ("MAX_PENDING", 2), ("SLOT_SECONDS", 0.02)):
        monkeypatch.setattr(module, name, value)
    handshakes = TlsHandshakes()
    with Pairs() as pairs:
        server, client = pairs.connect()
        client.sendall(hello())

        async def end_slowly() -> None:
            async with handshakes.turn(server, "old"):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await asyncio.Event().wait()

        old = asyncio.create_task(end_slowly())
        await eventually(lambda: handshakes.computing)
        crowd = Crowd(handshakes, pairs)
        crowd.add("other", hello())
        await eventually(lambda: handshakes.waits("other"))
        crowd.add("silent", b"")
        await crowd.begun_are(1)
        assert old.cancelled()
        await crowd.end()


def done(tasks: Sequence[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]
