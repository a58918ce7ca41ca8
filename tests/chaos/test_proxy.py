"""The proxy does to bytes what each condition says, and nothing without one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from tests.chaos import namespaces
from tests.chaos.namespaces import Host, Namespace
from tests.chaos.proxy import Link
from tests.cluster.harness import hold_port
from tests.fakes.waiting import PATIENCE, eventually

SENT = bytes(range(256)) * 4


@dataclass
class Rig:
    """A server on the far side of a link, and one connection to it."""

    link: Link
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray  # by the server
    ended: asyncio.Event  # set when the server sees the end of the stream

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    received, ended = bytearray(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                received.extend(data)
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with hold_port() as held:
        near, far = held.getsockname()[1], server.sockets[0].getsockname()[1]
        link = Link("a-b", "peer", Host(), Host(), near, seed=1, far_port=far)
        link.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", near)
        try:
            yield Rig(link, reader, writer, received, ended)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            link.stop()
            await eventually(ended.is_set)
            server.close()
            await server.wait_closed()


async def test_a_socket_with_the_number_of_one_that_was_reset_is_heard() -> None:
    async with rig() as made:
        await made.send(SENT)
        await eventually(lambda: len(made.received) == len(SENT))
        made.link.reset()
        # Lowest free numbers first: those of the sockets that were just closed.
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, other.send, b"x")
            async with asyncio.timeout(PATIENCE):
                assert await loop.sock_recv(one, 1) == b"x"


async def dial_and_read(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.readexactly(1)
    finally:
        writer.close()


async def test_bytes_pass_both_ways_and_the_end_too() -> None:
    async with rig() as made:
        await made.send(SENT)
        assert await made.reader.readexactly(len(SENT)) == SENT
        made.writer.write_eof()
        await eventually(made.ended.is_set)
        assert await made.reader.read() == b""
        assert made.link.bytes == {"up": len(SENT), "down": len(SENT)}


async def test_withheld_bytes_leave_afterwards() -> None:
    async with rig() as made:
        made.link.conditions["up"].withheld = True
        await made.send(SENT)
        await asyncio.sleep(0.05)
        assert not made.received
        made.link.heal()
        assert await made.reader.readexactly(len(SENT)) == SENT


async def test_swallowed_bytes_never_arrive_and_the_connection_stays() -> None:
    async with rig() as made:
        made.link.conditions["up"].swallowed = True
        await made.send(b"lost")
        await eventually(lambda: made.link.swallowed["up"] == len(b"lost"))
        made.link.heal()
        await made.send(b"kept")
        assert await made.reader.readexactly(4) == b"kept"
        assert bytes(made.received) == b"kept"


async def test_one_direction_can_be_disturbed_by_itself() -> None:
    async with rig() as made:
        made.link.conditions["down"].swallowed = True
        await made.send(SENT)
        await eventually(lambda: bytes(made.received) == SENT)
        assert made.link.bytes["down"] == 0


async def test_a_flip_changes_one_bit() -> None:
    async with rig() as made:
        made.link.conditions["up"].flips = 1
        await made.send(SENT)
        await eventually(lambda: len(made.received) == len(SENT))
        changed = [a ^ b for a, b in zip(SENT, made.received, strict=True) if a != b]
        assert [each.bit_count() for each in changed] == [1]
        assert made.link.conditions["up"].flips == 0


async def test_a_cut_ends_the_connection_within_a_chunk() -> None:
    async with rig() as made:
        made.link.conditions["up"].cuts = 1
        await made.send(SENT)
        await eventually(made.ended.is_set)
        assert len(made.received) < len(SENT)
        assert SENT.startswith(bytes(made.received))


async def test_repeated_bytes_arrive_twice() -> None:
    async with rig() as made:
        made.link.conditions["up"].repeats = 1
        await made.send(b"once")
        await eventually(lambda: bytes(made.received) == b"onceonce")


async def test_a_limited_rate_lets_everything_through() -> None:
    async with rig() as made:
        made.link.conditions["up"].rate = 20_000.0
        made.link.conditions["up"].delay = 0.01
        await made.send(SENT)
        assert await made.reader.readexactly(len(SENT)) == SENT


async def test_reset_and_refused_connections() -> None:
    async with rig() as made:
        await made.send(b"x")
        await made.reader.readexactly(1)
        assert made.link.reset() == 1
        with pytest.raises(ConnectionResetError):
            await made.reader.readexactly(1)
        await eventually(made.ended.is_set)
        made.link.refusing = True
        with pytest.raises(ConnectionError):
            await dial_and_read(made.link.port)


async def test_a_namespace_reaches_others_only_through_links() -> None:
    if reason := namespaces.missing():
        pytest.skip(reason)
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    namespace = Namespace("test")
    namespace.create()
    link = Link("a-b", "control", namespace, Host(), port, seed=1)
    try:
        for expected in (False, True):
            with namespace.socket() as dialling:
                dialling.setblocking(False)
                if expected:
                    link.start()
                    await loop.sock_connect(dialling, ("127.0.0.1", port))
                    assert await loop.sock_recv(dialling, 1) == b""
                else:
                    with pytest.raises(ConnectionRefusedError):
                        await loop.sock_connect(dialling, ("127.0.0.1", port))
    finally:
        link.stop()
        namespace.delete()
        server.close()
