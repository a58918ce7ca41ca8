"""The router's HTTP listeners: opened and closed together, with API keys and certificates that can be reloaded."""

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
from router.connections import ConnectionLimit
from router.listeners import BACKLOG, TlsFiles, owner_socket

BIND_SECONDS = 5.0  # how long to retry a port in use: the previous router may still be shutting down
HANDSHAKE_SECONDS = 10.0


@dataclass(slots=True)
class HttpListeners:
    """All HTTP listeners. `public` serves the API; the others are for operators."""

    log: Log
    public: web.AppRunner
    address: tuple[str, int]  # of the API
    owner: web.AppRunner  # serves the admin socket
    admin: web.AppRunner | None  # serves the port of `router.admin: http://...`
    admin_address: tuple[str, int] | None
    admin_socket: Path
    tls: TlsFiles | None
    keys: KeyFile | None
    limit: ConnectionLimit  # of all listeners but the admin socket
    watcher: asyncio.Task[None] | None = None
    bound: bool = False  # this router created the admin socket

    async def start(self) -> None:
        """Open all listeners. Raises ConfigError if an address cannot be bound."""
        await self.owner.setup()
        listener = owner_socket(self.admin_socket)
        self.bound = True
        listener.listen(BACKLOG)
        await _Site(self.owner, [listener], self.log, None, None).start()
        if self.admin is not None and self.admin_address is not None:
            await self._listen(self.admin, *self.admin_address, "router.admin", None)
        await self._listen(self.public, *self.address, "router.port", self.tls)
        if self.keys is not None:
            self.watcher = asyncio.create_task(self.keys.watch())

    def reload(self) -> None:
        """Read the API keys and the TLS files again, on SIGHUP. Invalid files change nothing."""
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
                    "cannot reload the TLS files; the previous certificate stays in use", reason=str(error)
                )

    @property
    def connections(self) -> int:
        """Number of open connections of all listeners."""
        servers = (runner.server for runner in self._runners)
        return sum(len(server.connections) for server in servers if server is not None)

    @property
    def _runners(self) -> list[web.AppRunner]:
        return [self.public, self.owner, *([self.admin] if self.admin is not None else [])]

    async def close(self) -> None:
        """Close all listeners. Answers in progress get SHUTDOWN_SECONDS to finish; then they are cancelled."""
        if self.watcher is not None:
            self.watcher.cancel()
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        if self.bound:  # otherwise it belongs to another router
            self.admin_socket.unlink(missing_ok=True)

    async def _listen(
        self, runner: web.AppRunner, host: str, port: int, key: str, tls: TlsFiles | None
    ) -> None:
        """Serve `runner` at host:port. Raises ConfigError, which names `key`, the config key of the port."""
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
        await _Site(runner, sockets, self.log, tls.context if tls is not None else None, self.limit).start()


class _Site(web.BaseSite):
    """The listening sockets of one runner."""

    def __init__(
        self,
        runner: web.AppRunner,
        sockets: Sequence[socket.socket],
        log: Log,
        context: ssl.SSLContext | None,
        limit: ConnectionLimit | None,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self._sockets = sockets
        self._log = log
        self._limit = limit

    @property
    def name(self) -> str:
        return ", ".join(str(each.getsockname()) for each in self._sockets)

    async def start(self) -> None:
        await super().start()
        assert self._runner.server is not None
        acceptor = Acceptor(
            self._sockets, self._runner.server, self._log, self._ssl_context, HANDSHAKE_SECONDS, self._limit
        )
        # aiohttp uses only `sockets`, `close` and `wait_closed` of it.
        self._server = cast(asyncio.AbstractServer, acceptor)


def _cannot_bind(host: str, port: int, key: str, error: OSError) -> ConfigError:
    """Name the config key to change: `key` for the port, or `router.host` for an address that this host lacks."""
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
