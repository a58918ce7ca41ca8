"""Notifies an event loop that connections of a listening socket have ended, based on ZMQ's own events.

libzmq allows one monitor per socket and silently stops an earlier one. The monitor of a TCP socket belongs to its
handshake guard, whose thread passes the events on; other sockets get a monitor here.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

import zmq


class Disconnects(Protocol):
    """`fileno` becomes readable when a connection has ended; then call `take` until it returns False."""

    def fileno(self) -> int: ...

    def take(self) -> bool:
        """Return whether connections have ended since the last call."""
        ...

    def close(self) -> None: ...


class DisconnectSignal:
    """Notified by another thread, which calls `notify`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def notify(self) -> None:
        # A full buffer already carries the notification; after `close` nobody listens.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def take(self) -> bool:
        ended = False
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                ended = True
        return ended

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Monitored:
    """Uses a monitor of its own on a socket that has no other. Close it before the socket."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self._monitor = watched.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def fileno(self) -> int:
        return int(self._monitor.getsockopt(zmq.FD))

    def take(self) -> bool:
        ended = False
        with contextlib.suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                ended = True
        return ended

    def close(self) -> None:
        self._watched.disable_monitor()
        self._monitor.close(linger=0)
