"""The network between the hosts: a TCP proxy per link that delays, withholds, drops and damages bytes."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.namespaces import Host

CHUNK = 65_536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
Direction = Literal["up", "down"]  # up: from the connecting side


@dataclass
class Conditions:
    """What happens to the bytes of one direction; may change while connections are open."""

    delay: float = 0.0  # seconds per chunk
    rate: float = 0.0  # bytes per second; 0: unlimited
    # Nothing is forwarded, not even the end; held bytes are sent afterwards (a partition).
    withheld: bool = False
    swallowed: bool = False  # bytes vanish but the connection stays open (a half-open path)
    flips: int = 0  # chunks still to be damaged in one byte
    repeats: int = 0  # chunks still to be sent twice
    cuts: int = 0  # connections still to be ended in the middle of a chunk
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def heal(self) -> None:
        self.delay = self.rate = 0.0
        self.withheld = self.swallowed = False
        self.flips = self.repeats = self.cuts = 0
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Connection:
    """Two sockets and the tasks that copy between them."""

    def __init__(self, dialled: socket.socket, onward: socket.socket) -> None:
        self.ends = (dialled, onward)
        self.tasks: list[asyncio.Task[None]] = []

    def reset(self) -> None:
        """Send RST to both ends."""
        for end in self.ends:
            with suppress(OSError):  # closed already
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for end in self.ends:
            _close(end)


def _close(watched: socket.socket) -> None:
    """Close a socket that tasks may wait for. The loop has to forget it before another one gets its number."""
    if watched.fileno() < 0:
        return
    loop = asyncio.get_running_loop()
    loop.remove_reader(watched)
    loop.remove_writer(watched)
    watched.close()


class Link:
    """Listens at `port` on `near`'s loopback and forwards connections to `far_port`, or the same port, on `far`."""

    def __init__(
        self, name: str, kind: str, near: Host, far: Host, port: int, seed: int, far_port: int = 0
    ) -> None:
        self.name = name
        self.kind = kind  # control, peer or bulk
        self.conditions: dict[Direction, Conditions] = {"up": Conditions(), "down": Conditions()}
        self.refusing = False  # whether new connections are closed at once
        self.bytes: dict[Direction, int] = {"up": 0, "down": 0}  # forwarded
        self.swallowed: dict[Direction, int] = {"up": 0, "down": 0}  # bytes
        self._near, self._far, self.port = near, far, port
        self._far_port = far_port or port
        self._rng = random.Random(seed)
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        listener = self._near.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        listener.setblocking(False)
        self._listener = listener
        self._task = asyncio.create_task(self._accept(listener))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._listener is not None:
            _close(self._listener)
        for connection in list(self._connections):
            connection.close()

    def reset(self) -> int:
        """Reset every connection and return their number."""
        for connection in list(self._connections):
            connection.reset()
        return len(self._connections)

    def heal(self) -> None:
        self.refusing = False
        for conditions in self.conditions.values():
            conditions.heal()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        served: set[asyncio.Task[None]] = set()
        while True:
            dialled, _ = await loop.sock_accept(listener)
            dialled.setblocking(False)
            if self.refusing:
                dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                dialled.close()
                continue
            task = asyncio.create_task(self._serve(dialled))
            served.add(task)
            task.add_done_callback(served.discard)

    async def _serve(self, dialled: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        onward = self._far.socket()
        onward.setblocking(False)
        connection = Connection(dialled, onward)
        try:
            await loop.sock_connect(onward, ("127.0.0.1", self._far_port))
        except OSError:
            connection.reset()
            return
        for end in connection.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(connection)
        connection.tasks = [
            asyncio.create_task(self._pump(dialled, onward, "up")),
            asyncio.create_task(self._pump(onward, dialled, "down")),
        ]
        done, _ = await asyncio.wait(connection.tasks, return_when=asyncio.FIRST_EXCEPTION)
        self._connections.discard(connection)
        errors = [task.exception() for task in done if not task.cancelled()]
        if any(isinstance(error, ConnectionAbortedError) for error in errors):
            connection.close()
        elif any(errors):
            connection.reset()
        else:
            connection.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        """Copy bytes. Raises OSError if an end was reset; then both are."""
        loop = asyncio.get_running_loop()
        conditions = self.conditions[direction]
        while True:
            data = await loop.sock_recv(source, CHUNK)
            while conditions.withheld:
                await conditions.changed.wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            if conditions.delay:
                await asyncio.sleep(conditions.delay)
            if conditions.swallowed:
                self.swallowed[direction] += len(data)
                continue
            self.bytes[direction] += len(data)
            if conditions.cuts:
                conditions.cuts -= 1
                await self._forward(sink, data[: len(data) // 2], conditions)
                raise ConnectionAbortedError("cut by the proxy")
            for part in self._damaged(data, conditions):
                await self._forward(sink, part, conditions)

    def _damaged(self, data: bytes, conditions: Conditions) -> list[bytes]:
        if conditions.flips:
            conditions.flips -= 1
            at = self._rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
        if conditions.repeats:
            conditions.repeats -= 1
            return [data, data]
        return [data]

    async def _forward(self, sink: socket.socket, data: bytes, conditions: Conditions) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view:
            size = len(view)
            if conditions.rate:
                size = min(size, max(1, int(conditions.rate * 0.02)))
                await asyncio.sleep(size / conditions.rate)
            await loop.sock_sendall(sink, view[:size])
            view = view[size:]
