"""Bounds TLS handshakes, which compute on the event loop: a thousand at once would block it for a quarter of a second.

A connection waits, without any work, until its first message is complete; then it waits for one of SLOTS, and clients
take turns. A client that begins a handshake and stays silent loses its slot while another client waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SLOTS = 16  # an RSA key of 2,048 bits takes a millisecond per handshake
SLOT_SECONDS = 1.0  # a handshake that takes longer is ended while another client waits
# Connections whose handshake has not ended. For another one, the oldest is closed: it has had the most time.
MAX_PENDING = 2048

RECORD_HEAD = 5  # bytes: type, version, length
MESSAGE_HEAD = 4  # bytes: type, length
HANDSHAKE, CLIENT_HELLO = 22, 1
MAX_RECORD = 1 << 14


class TlsHandshakes:
    """Admits the handshakes of one server. Single-threaded."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Task[object], str] = {}  # task -> client, in order of arrival
        self._by_client: Counter[str] = Counter()
        self._taken = 0  # slots
        self._running: dict[asyncio.Task[object], tuple[str, float]] = {}  # task -> its client and start
        # client -> turns; the first client is next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def computing(self) -> int:
        """Number of handshakes that hold a slot."""
        return self._taken

    def waits(self, client: str) -> bool:
        """Return whether a connection of this client waits for its turn."""
        return client in self._waiting

    def pending(self, client: str) -> int:
        """Return the number of connections of a client whose handshake has not ended."""
        return self._by_client[client]

    @asynccontextmanager
    async def turn(self, connection: socket.socket, client: str) -> AsyncIterator[None]:
        """Wait for the turn of a connection; inside the context its handshake may compute.

        Raises ConnectionError as `client_hello` does. The task is cancelled if the connection has to make room.
        """
        task = asyncio.current_task()
        assert task is not None
        if len(self._pending) >= MAX_PENDING:
            # It ends only in a later turn of the loop, but no longer counts: the next arrival ends another one.
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        self._pending[task] = client
        self._by_client[client] += 1
        try:
            await client_hello(connection)
            await self._take_slot(client)
            self._running[task] = client, asyncio.get_running_loop().time()
            try:
                yield
            finally:
                del self._running[task]
                self._give_slot_back()
        finally:
            self._pending.pop(task, None)
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    async def _take_slot(self, client: str) -> None:
        if self._taken < SLOTS:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget_turn(client, turn)
            else:
                self._give_slot_back()
            raise

    def _forget_turn(self, client: str, turn: asyncio.Future[None]) -> None:
        """Let nobody make room for a connection that waits no longer."""
        turns = self._waiting.get(client, deque())
        # It may have been passed over already.
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _give_slot_back(self) -> None:
        """Pass the slot on to the next client that waits."""
        while self._waiting:
            client, turns = next(iter(self._waiting.items()))
            # The next turn is that of another client.
            del self._waiting[client]
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                self._watch()
                return
        self._taken -= 1

    def _watch(self) -> None:
        """End handshakes that have used up their time while another client waits."""
        if self._look is None and self._waiting:
            self._look = asyncio.get_running_loop().call_later(SLOT_SECONDS, self._end_old)

    def _end_old(self) -> None:
        self._look = None
        now = asyncio.get_running_loop().time()
        for task, (client, since) in self._running.items():
            if now - since >= SLOT_SECONDS and self._waiting.keys() - {client}:
                task.cancel()
        self._watch()


async def client_hello(connection: socket.socket) -> None:
    """Return once the first message of a TLS client can be read completely. Nothing is taken from the socket.

    Also returns if the first bytes are not TLS, which a handshake refuses without computing. Raises ConnectionError if
    the client disconnects, or if its first record is not one whole ClientHello.
    """
    if (await _peek(connection, 1))[0] != HANDSHAKE:
        return
    head = await _peek(connection, RECORD_HEAD + MESSAGE_HEAD)
    record, message = int.from_bytes(head[3:5], "big"), int.from_bytes(head[6:9], "big")
    whole = record == MESSAGE_HEAD + message and record <= MAX_RECORD
    if head[RECORD_HEAD] != CLIENT_HELLO or not whole:
        raise ConnectionAbortedError("the first record of the connection is not one whole ClientHello")
    await _peek(connection, RECORD_HEAD + record)


async def _peek(connection: socket.socket, size: int) -> bytes:
    """Return the first `size` bytes that have arrived, without a wake-up for fewer. Raises ConnectionError."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not arrived.done():
            arrived.set_result(None)

    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    loop.add_reader(connection, readable)
    try:
        await arrived
        data = connection.recv(size, socket.MSG_PEEK)
    finally:
        loop.remove_reader(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    if len(data) < size:
        raise ConnectionResetError("the client has disconnected")
    return data
