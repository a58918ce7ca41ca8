"""Connections are accepted a few per turn of the event loop, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.observability.logs import Log
from router.server import accepting
from router.server.accepting import ACCEPTED_PER_TURN, ConnectionAcceptor, listening_sockets
from router.server.connections import ConnectionLimit
from router.server.handshakes import SLOTS, TlsHandshakes
from router.server.sockets import TlsFiles
from tests.fakes.exhausted_listener import ExhaustedListener
from tests.fakes.tls_files import AUTHORITY, copy_certificates
from tests.fakes.turn_count import counting_turns
from tests.fakes.waiting import PATIENCE, eventually


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True


@asynccontextmanager
async def accepting_at(
    listener: socket.socket, protocol: Callable[[], asyncio.BaseProtocol] = Echo, **options: Any
) -> AsyncIterator[ConnectionAcceptor]:
    acceptor = ConnectionAcceptor([listener], protocol, Log("test"), **options)
    try:
        yield acceptor
    finally:
        acceptor.close()
        await acceptor.wait_closed()


async def echoed(address: tuple[str, int], tls: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    writer.write(b"hello")
    answer = await reader.readexactly(5)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_crowd_that_connects_at_once_is_accepted_a_few_per_turn() -> None:
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=1024)
    crowd = [socket.create_connection(listener.getsockname()) for _ in range(10 * ACCEPTED_PER_TURN)]
    async with counting_turns() as count:

        def noted() -> Echo:
            count.note()
            return Echo()

        async with accepting_at(listener, noted):
            await eventually(lambda: count.total == len(crowd))
            # Tasks open the connections: tasks of one turn may run together with those of the previous one.
            assert count.most <= 2 * ACCEPTED_PER_TURN
            for connection in crowd:
                connection.close()


async def test_tls_and_a_client_that_speaks_something_else(tmp_path: Path) -> None:
    files = TlsFiles(*copy_certificates(tmp_path), None)
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=8)
    address = listener.getsockname()
    async with accepting_at(listener, context=files.context, handshake_seconds=PATIENCE):
        trusting = ssl.create_default_context(cafile=AUTHORITY)
        assert await echoed(address, trusting) == b"hello"
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"hello" not in await reader.read()
        writer.close()
        assert await echoed(address, trusting) == b"hello"


async def test_a_handshake_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    files = TlsFiles(*copy_certificates(tmp_path), None)
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=8)
    async with accepting_at(listener, context=files.context, handshake_seconds=0.05) as acceptor:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
        await eventually(lambda: acceptor.opening == 0)


async def test_descriptors_that_run_out_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 0.01)
    listener = ExhaustedListener()
    async with accepting_at(listener):
        answer = asyncio.create_task(echoed(listener.getsockname()))
        await eventually(lambda: listener.refused > 1)
        listener.exhausted = False
        assert await answer == b"hello"


async def test_the_loop_does_not_turn_for_descriptors_that_have_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 1000.0)
    listener = ExhaustedListener()
    async with accepting_at(listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await eventually(lambda: listener.refused)
        for _ in range(10):
            await asyncio.sleep(0)
        assert listener.refused == 1
        writer.close()


async def test_closing_keeps_what_was_accepted() -> None:
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=8)
    address = listener.getsockname()
    async with accepting_at(listener) as acceptor:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"1")
        assert await reader.readexactly(1) == b"1"
        acceptor.close()
        writer.write(b"2")
        assert await reader.readexactly(1) == b"2"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.close()


async def test_a_port_that_is_taken_leaves_no_socket_open() -> None:
    [taken] = await listening_sockets("127.0.0.1", 0, backlog=8)
    with taken, pytest.raises(OSError) as raised:
        await listening_sockets("127.0.0.1", taken.getsockname()[1], backlog=8)
    assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
async def test_a_text_that_cannot_be_a_name_is_not_found(host: str) -> None:
    with pytest.raises(socket.gaierror):
        await listening_sockets(host, 0, backlog=8)


async def test_a_crowd_of_tls_clients_is_served_and_computes_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TlsFiles(*copy_certificates(tmp_path), None)
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=1024)
    trusting = ssl.create_default_context(cafile=AUTHORITY)
    most = running = 0
    turn = TlsHandshakes.turn

    @asynccontextmanager
    async def noted(self: TlsHandshakes, connection: socket.socket, client: str) -> AsyncIterator[None]:
        nonlocal most, running
        async with turn(self, connection, client):
            running += 1
            most = max(most, running)
            yield
            running -= 1

    monkeypatch.setattr(TlsHandshakes, "turn", noted)
    served: list[Echo] = []

    def serve() -> Echo:
        served.append(Echo())
        return served[-1]

    async with accepting_at(listener, serve, context=files.context, handshake_seconds=PATIENCE):
        answers = await asyncio.gather(*(echoed(listener.getsockname(), trusting) for _ in range(5 * SLOTS)))
        await eventually(lambda: all(each.is_lost for each in served))
    assert answers == [b"hello"] * (5 * SLOTS)
    assert 0 < most <= SLOTS


async def test_connections_before_their_handshake_count_towards_the_limit_of_their_client(
    tmp_path: Path,
) -> None:
    files = TlsFiles(*copy_certificates(tmp_path), None)
    [listener] = await listening_sockets("127.0.0.1", 0, backlog=8)
    limit = ConnectionLimit(per_client=2, total=100)
    async with accepting_at(listener, context=files.context, limit=limit):
        silent = [await asyncio.open_connection(*listener.getsockname()) for _ in range(2)]
        third, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(PATIENCE):
            assert await third.read() == b""
        for _, each in (*silent, (third, writer)):
            each.close()


async def test_a_process_that_leaves_its_port_serves_what_waited_there_and_another_takes_the_rest() -> None:
    (first,) = await listening_sockets("127.0.0.1", 0, 16, shared=True)
    address = first.getsockname()
    with contextlib.ExitStack() as clients:
        # They are in the queue of the only listener when it leaves.
        waiting = [clients.enter_context(socket.create_connection(address)) for _ in range(12)]
        async with accepting_at(first) as leaving:
            (second,) = await listening_sockets("127.0.0.1", address[1], 16, shared=True)
            async with accepting_at(second):
                leaving.stop_listening()
                leaving.stop_listening()
                await eventually(lambda: not leaving.opening)
                for each in waiting:
                    each.sendall(b"hello")
                for each in waiting:
                    each.settimeout(PATIENCE)
                    assert await asyncio.to_thread(each.recv, 5) == b"hello"
                assert [await echoed(address) for _ in range(8)] == [b"hello"] * 8


class Aborted(socket.socket):
    """Listens on a free port of the loopback address; the first of the pending connections has been reset."""

    def __init__(self) -> None:
        super().__init__()
        self.reset = True
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.reset:
            self.reset = False
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return super().accept()


async def test_a_connection_that_was_reset_takes_no_other_with_it_when_its_process_leaves() -> None:
    listener = Aborted()
    with socket.create_connection(listener.getsockname()) as waiting:
        async with accepting_at(listener) as leaving:
            leaving.stop_listening()
            await eventually(lambda: not leaving.opening)
            waiting.settimeout(PATIENCE)
            waiting.sendall(b"hello")
            assert await asyncio.to_thread(waiting.recv, 5) == b"hello"
