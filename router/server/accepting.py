"""Accepts connections a few per turn of the event loop, on sockets that already listen.

The servers of asyncio and uvloop accept every pending connection in one turn: a thousand clients that connect at once
would block the loop for a quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence

from common.exhaustion import EXHAUSTED, RETRY_SECONDS
from common.observability.logs import Log
from router.http.client import client_address
from router.server.connections import ConnectionLimit
from router.server.handshakes import TlsHandshakes

ACCEPTED_PER_TURN = 8  # per listening socket
HANDSHAKE_SECONDS = 10.0


class ConnectionAcceptor:
    """Passes each accepted connection to a new protocol. It listens from its creation until `close`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        log: Log,
        context: ssl.SSLContext | None = None,
        limit: ConnectionLimit | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Take ownership of `sockets`, which are bound and listen.

        Args:
            context: if set, every connection begins with a TLS handshake of at most `handshake_seconds`.
            limit: counts connections once the protocol has them; those before the end of their handshake count
                towards the limit of their client, too.
        """
        self.sockets = tuple(sockets)
        self._protocol = protocol
        self._log = log
        self._context = context
        self._handshake_seconds = handshake_seconds
        self._limit = limit
        self._handshakes = TlsHandshakes()
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._closed = False
        for listener in self.sockets:
            listener.setblocking(False)
            self._watch(listener)

    def close(self) -> None:
        """Stop listening. Accepted connections stay open unless their handshake is in progress."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        for task in self._opening:
            task.cancel()

    def stop_listening(self) -> None:
        """Accept what is pending, then leave the port to other processes that listen there."""
        for listener in self.sockets:
            with contextlib.suppress(OSError):
                while listener.fileno() >= 0 and self._accept_one(listener):
                    pass
        self._leave()

    @property
    def opening(self) -> int:
        """Number of connections that are not handed to the server yet, handshakes included."""
        return len(self._opening)

    async def wait_closed(self) -> None:
        """Wait until no handshake is in progress."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        self._retries.pop(listener, None)
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a few connections; the loop calls this again in its next turn while more are pending."""
        try:
            for _ in range(ACCEPTED_PER_TURN):
                if not self._accept_one(listener):
                    return
        except OSError as error:
            self._log.warning("cannot accept connections for a moment", reason=str(error))
            self._loop.remove_reader(listener)
            self._retries[listener] = self._loop.call_later(RETRY_SECONDS, self._watch, listener)

    def _accept_one(self, listener: socket.socket) -> bool:
        """Accept a connection, and return False if none is pending. Raises OSError if resources have run out."""
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            # This connection ended before it was accepted.
            return True
        self._begin(connection, address)
        return True

    def _begin(self, connection: socket.socket, address: tuple[str, int]) -> None:
        connection.setblocking(False)
        opening = self._open(connection) if self._context is None else self._secure(connection, address)
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _leave(self) -> None:
        """Close the listening sockets, unless that has been done."""
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        for listener in self.sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except (OSError, asyncio.CancelledError):
            # Not logged: the client has disconnected.
            connection.close()

    async def _secure(self, connection: socket.socket, address: tuple[str, int]) -> None:
        client = client_address(address[0])
        if self._limit is not None and not self._limit.has_room(client, self._handshakes.pending(client)):
            connection.close()
            return
        try:
            async with (
                asyncio.timeout(self._handshake_seconds),
                self._handshakes.turn(connection, client),
            ):
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=self._handshake_seconds,
                )
        except (OSError, asyncio.CancelledError):
            # Not logged: the client has disconnected, or its handshake failed, took too long or made room for others.
            connection.close()


async def listening_sockets(host: str, port: int, backlog: int, shared: bool = False) -> list[socket.socket]:
    """Return sockets that listen at every address of `host`. Raises OSError.

    `shared`: other processes of this user listen there, too, and the kernel gives each connection to one of them.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError as error:  # a part of the name is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    made: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            made.append(socket.create_server(address, family=family, backlog=backlog, reuse_port=shared))
    except BaseException:
        for each in made:
            each.close()
        raise
    return made
