"""The router's HTTP listeners: opened and closed together, with API keys and certificates that can be reloaded."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from aiohttp import web

from common.errors import ConfigError
from common.observability.logs import Log
from router.auth.gates import Entrance, Gate, OwnerGate
from router.auth.keys import KeyFile
from router.auth.ledger import SharedLedger
from router.auth.origin import Cors
from router.http.error_log import ErrorLog
from router.http.errors import Answered, error_middleware
from router.server.accepting import ConnectionAcceptor, listening_sockets
from router.server.admin_socket import AdminSocket
from router.server.connection_log import ConnectionLog
from router.server.connections import ConnectionLimit
from router.server.http_server import http_runner, leave
from router.server.sockets import BACKLOG, TlsFiles, owner_socket

AddRoutes = Callable[[web.Application], None]

BIND_SECONDS = 5.0  # how long to retry a port in use: the previous router may still be shutting down


@dataclass(frozen=True, slots=True)
class TcpEntry:
    """A TCP address for clients, and whom it admits."""

    address: tuple[str, int]  # host and port
    key: str  # the config key of the port, for errors
    gate: Gate
    cors: Cors
    tls: TlsFiles | None = None  # None: plain HTTP


@dataclass(frozen=True, slots=True)
class HttpPlan:
    """The addresses on which the router listens for clients and operators, and whom it admits there."""

    public: TcpEntry  # serves the API
    admin: TcpEntry | None  # the port of `router.admin: http://...`
    admin_socket: Path
    keys: KeyFile | None
    limit: ConnectionLimit  # for all listeners but the admin socket
    body_bytes: int  # the largest accepted body
    name: str  # of this process
    # The Unix socket of this process, if several router processes listen at these addresses; None: it is the only one.
    own_socket: Path | None
    peers: Mapping[str, Path]  # the sockets of the others on this host, by name
    ledger: SharedLedger | None  # of the use of API keys by all of them
    connection_log: ConnectionLog  # of `limit`


class HttpListeners:
    """All HTTP listeners. `public` serves the API; the others are for operators and other router processes."""

    def __init__(
        self,
        plan: HttpPlan,
        add_routes: AddRoutes,
        add_admin_routes: AddRoutes,
        add_host_routes: AddRoutes,
        log: Log,
        answered: Answered,
    ) -> None:
        """
        Args:
            add_admin_routes: adds what only operators may do.
            add_host_routes: adds what only the router processes of this host may do.
            answered: is called after every answer to a client or operator.
        """
        self.plan = plan
        self.log = log
        most, limit = plan.body_bytes, plan.limit
        operators = (add_routes, add_admin_routes)
        make = partial(application, body_bytes=most, log=log, answered=answered)
        public, admin = plan.public, plan.admin
        self.public = http_runner(make(public.gate, public.cors, routes=(add_routes,)), limit)
        self.owner = http_runner(make(OwnerGate(), Cors(()), routes=operators))
        self.own = http_runner(application(OwnerGate(), Cors(()), most, log, (*operators, add_host_routes)))
        self.admin: web.AppRunner | None = None
        if admin is not None:
            self.admin = http_runner(make(admin.gate, admin.cors, routes=operators), limit)
        self._sites: list[_Site] = []  # on ports
        self._leaving = False
        for runner in self._on_ports:
            runner.app.on_response_prepare.append(self._close_when_leaving)
        self._watcher: asyncio.Task[None] | None = None
        self._admin_socket = AdminSocket(plan.admin_socket, plan.own_socket is not None, log)

    async def start(self) -> None:
        """Open all listeners. Raises ConfigError if an address cannot be bound."""
        plan = self.plan
        await self.owner.setup()
        await self._admin_socket.start(partial(self._serve_unix, self.owner))
        if plan.own_socket is not None:
            await self.own.setup()
            await self._serve_unix(self.own, owner_socket(plan.own_socket))
        if self.admin is not None and plan.admin is not None:
            await self._listen(self.admin, plan.admin)
        await self._listen(self.public, plan.public)
        if plan.keys is not None:
            self._watcher = asyncio.create_task(plan.keys.watch())

    def reload(self) -> None:
        """Read the API keys and the TLS files again, on SIGHUP. Invalid files change nothing."""
        keys, tls = self.plan.keys, self.plan.public.tls
        if keys is None and tls is None:
            self.log.info("nothing to reload: this cluster has neither security.api_keys nor router.tls")
        if keys is not None:
            keys.ask()
        if tls is not None:
            try:
                tls.load()
                self.log.info("read the TLS files again")
            except ConfigError as error:
                self.log.error(
                    "cannot reload the TLS files; the previous certificate stays in use", reason=str(error)
                )

    def leave_port(self) -> bool:
        """Let other router processes of this host take new connections, and end open ones with their next answer.

        Return False without others. The port then stays open, so that clients get the reason why they are refused.
        """
        self._leaving = bool(self.plan.peers)
        if self._leaving:
            for site in self._sites:
                site.stop_listening()
            for runner in self._on_ports:
                leave(runner)
        return self._leaving

    async def _close_when_leaving(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._leaving:
            response.force_close()
            response.headers["Connection"] = "close"

    @property
    def open_connections(self) -> int:
        """Number of open connections on ports."""
        servers = (runner.server for runner in self._on_ports)
        return sum(len(server.connections) for server in servers if server is not None)

    @property
    def _on_ports(self) -> list[web.AppRunner]:
        return [self.public] if self.admin is None else [self.public, self.admin]

    @property
    def _runners(self) -> list[web.AppRunner]:
        return [*self._on_ports, self.owner, self.own]

    async def close(self) -> None:
        """Close all listeners. Answers in progress get SHUTDOWN_SECONDS to finish; then they are cancelled."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._admin_socket.stop_waiting()
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        self._admin_socket.remove()
        if self.plan.own_socket is not None:
            self.plan.own_socket.unlink(missing_ok=True)
        if self.plan.ledger is not None:
            self.plan.ledger.close()
        self.plan.connection_log.close()

    async def _serve_unix(self, runner: web.AppRunner, listener: socket.socket) -> None:
        listener.listen(BACKLOG)
        await _Site(runner, [listener], self.log, None, None).start()

    async def _listen(self, runner: web.AppRunner, entry: TcpEntry) -> None:
        """Serve `runner` at an address. Raises ConfigError, which names the config key of the port."""
        (host, port), tls = entry.address, entry.tls
        await runner.setup()
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            try:
                sockets = await listening_sockets(host, port, BACKLOG, self.plan.own_socket is not None)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise _cannot_bind(host, port, entry.key, error) from error
            await asyncio.sleep(0.1)
        context = tls.context if tls is not None else None
        site = _Site(runner, sockets, self.log, context, self.plan.limit)
        await site.start()
        self._sites.append(site)


def application(
    gate: Gate,
    cors: Cors,
    body_bytes: int,
    log: Log,
    routes: Sequence[AddRoutes],
    answered: Answered = lambda request, response: None,
) -> web.Application:
    """Return the application of one listener. `body_bytes`: the largest accepted body."""
    entrance, errors = Entrance(gate, cors, log, time.monotonic), ErrorLog(log)
    app = web.Application(
        client_max_size=body_bytes, middlewares=[error_middleware(log, errors, answered), entrance.middleware]
    )
    app.on_cleanup.extend((errors.close, entrance.close))
    for add in routes:
        add(app)
    return app


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
        acceptor = ConnectionAcceptor(
            self._sockets, self._runner.server, self._log, self._ssl_context, self._limit
        )
        self._acceptor = acceptor
        # aiohttp uses only `sockets`, `close` and `wait_closed` of it.
        self._server = cast(asyncio.AbstractServer, acceptor)

    def stop_listening(self) -> None:
        """Accept what is pending, then leave the address to others."""
        self._acceptor.stop_listening()


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
