"""Tells an event loop that connections of a listening socket have ended, by ZMQ's own events.

libzmq keeps one monitor per socket and stops an earlier one without a word. A TCP socket's belongs to its handshake
guard, whose thread passes the news on; other sockets get a monitor here.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

import zmq


class Disconnects(Protocol):
    """`fileno` turns readable when a connection has ended; ask `take` until it returns False."""

    def fileno(self) -> int: ...

    def take(self) -> bool:
        """Whether connections have ended since the last call."""
        ...

    def close(self) -> None: ...


class Told:
    """Another thread calls `tell`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def tell(self) -> None:
        # a full buffer says the same already; after `close` nobody listens
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def take(self) -> bool:
        told = False
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                told = True
        return told

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Monitored:
    """Its own monitor of a socket that has no other. Close it before the socket."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self._monitor = watched.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def fileno(self) -> int:
        return int(self._monitor.getsockopt(zmq.FD))

    def take(self) -> bool:
        told = False
        with contextlib.suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                told = True
        return told

    def close(self) -> None:
        self._watched.disable_monitor()
        self._monitor.close(linger=0)
