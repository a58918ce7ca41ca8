"""The Unix socket of operators. One of the router processes of a host listens there, and answers for all of them.

Unix sockets cannot be shared like ports. The process that holds a lock on a file beside the socket listens; the kernel
gives the lock back when that process ends, and another one takes both over.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from common.errors import ConfigError
from common.observability.logs import Log
from router.server.sockets import owner_socket

LOOK_SECONDS = 0.25  # interval at which a process tries to take the lock

Serve = Callable[[socket.socket], Awaitable[None]]


class AdminSocket:
    """Binds the socket, at once or when the process that has it ends."""

    def __init__(self, path: Path, shared: bool, log: Log) -> None:
        """`shared`: other router processes of this cluster run on this host."""
        self._path = path
        self._shared = shared
        self._log = log
        self._lock = -1
        self._bound = False
        self._waiting: asyncio.Task[None] | None = None

    async def start(self, serve: Serve) -> None:
        """Let `serve` have the bound socket, now or later. Raises ConfigError if its path cannot be used."""
        if not self._shared or self._locked():
            await self._bind(serve)
        else:
            self._waiting = asyncio.create_task(self._wait(serve))

    def stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def remove(self) -> None:
        """Remove the socket, unless it belongs to another router, and let another process take it over."""
        if self._bound:
            self._path.unlink(missing_ok=True)
            self._bound = False
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _wait(self, serve: Serve) -> None:
        logged = ""
        while True:
            try:
                if self._lock >= 0 or self._locked():
                    await self._bind(serve)
                    return
            except (ConfigError, OSError) as error:
                # The reason may pass, such as a lack of descriptors, and no other process would take the socket over.
                if str(error) != logged:
                    logged = str(error)
                    self._log.warning("cannot take over the admin socket; trying again", reason=logged)
            await asyncio.sleep(LOOK_SECONDS)

    async def _bind(self, serve: Serve) -> None:
        listener = owner_socket(self._path)
        self._bound = True
        await serve(listener)

    def _locked(self) -> bool:
        """Return whether this process holds the lock, after an attempt to take it. Raises ConfigError."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("router.admin", f"cannot open {lock}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise ConfigError("router.admin", f"cannot lock {lock}: {error.strerror}") from error
        self._lock = descriptor
        return True
