"""Every socket that HTTP comes in by: opened together, closed together, their keys and certificates renewed."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web

from common.errors import ConfigError
from common.observability.logs import Log
from router.accepting import Acceptor, listening_sockets
from router.auth_keys import KeyFile
from router.listeners import BACKLOG, TlsFiles, owner_socket

BIND_SECONDS = 5.0  # for a port that is taken: the router before this one may still be going
HANDSHAKE_SECONDS = 10.0


@dataclass(slots=True)
class HttpListeners:
    """Every socket that HTTP comes in by. `public` is the one of the API; the others are for operators."""

    log: Log
    public: web.AppRunner
    address: tuple[str, int]  # of the API
    owner: web.AppRunner  # on the admin socket
    admin: web.AppRunner | None  # on router.admin: http://...
    admin_address: tuple[str, int] | None
    admin_socket: Path
    tls: TlsFiles | None
    keys: KeyFile | None
    watcher: asyncio.Task[None] | None = None
    bound: bool = False  # the admin socket is ours

    async def start(self) -> None:
        """Raises ConfigError where an address cannot be bound."""
        await self.owner.setup()
        listener = owner_socket(self.admin_socket)
        self.bound = True
        listener.listen(BACKLOG)
        await _Site(self.owner, [listener], self.log, None).start()
        if self.admin is not None and self.admin_address is not None:
            await self._listen(self.admin, *self.admin_address, "router.admin", None)
        await self._listen(self.public, *self.address, "router.port", self.tls)
        if self.keys is not None:
            self.watcher = asyncio.create_task(self.keys.watch())

    def reload(self) -> None:
        """SIGHUP: read the API keys and the TLS files again; those that cannot be used change nothing."""
        if self.keys is None and self.tls is None:
            self.log.info("nothing to reload: this cluster has neither security.api_keys nor router.tls")
        if self.keys is not None:
            self.keys.ask()
        if self.tls is not None:
            try:
                self.tls.load()
                self.log.info("read the TLS files again")
            except ConfigError as error:
                self.log.error(
                    "the TLS files cannot be read again; those from before hold", reason=str(error)
                )

    @property
    def connections(self) -> int:
        """How many connections of all listeners are open."""
        servers = (runner.server for runner in self._runners)
        return sum(len(server.connections) for server in servers if server is not None)

    @property
    def _runners(self) -> list[web.AppRunner]:
        return [self.public, self.owner, *([self.admin] if self.admin is not None else [])]

    async def close(self) -> None:
        """Gives answers that are being written a moment, and cancels the rest."""
        if self.watcher is not None:
            self.watcher.cancel()
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        if self.bound:  # else it is another router's
            self.admin_socket.unlink(missing_ok=True)

    async def _listen(
        self, runner: web.AppRunner, host: str, port: int, key: str, tls: TlsFiles | None
    ) -> None:
        """Raises ConfigError; `key` is the key of the port."""
        await runner.setup()
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            try:
                sockets = await listening_sockets(host, port, BACKLOG)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise _cannot_bind(host, port, key, error) from error
            await asyncio.sleep(0.1)
        await _Site(runner, sockets, self.log, tls.context if tls is not None else None).start()


class _Site(web.BaseSite):
    """Sockets that a runner is served by.

    TLS handshakes end soon: until then a connection counts towards no limit.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        sockets: Sequence[socket.socket],
        log: Log,
        context: ssl.SSLContext | None,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self._sockets = sockets
        self._log = log

    @property
    def name(self) -> str:
        return ", ".join(str(each.getsockname()) for each in self._sockets)

    async def start(self) -> None:
        await super().start()
        assert self._runner.server is not None
        acceptor = Acceptor(
            self._sockets, self._runner.server, self._log, self._ssl_context, HANDSHAKE_SECONDS
        )
        # aiohttp asks it for its sockets, and to close.
        self._server = cast(asyncio.AbstractServer, acceptor)


def _cannot_bind(host: str, port: int, key: str, error: OSError) -> ConfigError:
    """`key`: of the port; an address that this host does not have is a matter of the address."""
    key_of_host = "router.host" if key == "router.port" else key
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return ConfigError(
            key_of_host,
            f"this host has no address {host}; write 127.0.0.1, 0.0.0.0 for all of its addresses, or one of those that "
            "`ip address` shows",
        )
    if error.errno == errno.EACCES:
        return ConfigError(key, f"this user may not bind {host}:{port}; choose a port from 1024 on")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(key, f"another process listens on {host}:{port}; choose another port, or end it")
    return ConfigError(key, f"{host}:{port} cannot be bound ({error.strerror}); choose another port")
