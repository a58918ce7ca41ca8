"""Bounds the unfinished handshakes of a listening TCP socket, per source address and in total.

libzmq closes a handshake after HANDSHAKE_SECONDS but accepts any number until then, so a flood of half-open
connections could use up the process's descriptors. A thread follows libzmq's events. When there are too many
handshakes it ends the oldest: with CURVE an honest one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.ipc.disconnects import DisconnectSignal

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 1024
MAX_HANDSHAKES_PER_SOURCE = 512  # all processes of one host may connect at the same time
# Bytes received in a CURVE handshake: greeting 64, HELLO 202, INITIATE at least 259. A peer that does not know
# the server's public key gets no further than HELLO.
HANDSHAKE_BYTES = 64 + 202 + 259
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_BYTES_RECEIVED = struct.Struct("128xQ")  # in Linux's struct tcp_info

Peer = tuple[str, int]  # address and port


class Connections(Protocol):
    """The kernel's information about libzmq's connections."""

    def peer(self, descriptor: int) -> Peer | None:
        """Return the other end; None if the connection has ended."""
        ...

    def received(self, descriptor: int, peer: Peer) -> int | None:
        """Return the bytes received; None if the descriptor no longer belongs to this connection."""
        ...

    def end(self, descriptor: int, peer: Peer) -> None:
        """End the connection, if the descriptor still belongs to it."""
        ...


@dataclass(frozen=True, slots=True)
class _Handshake:
    peer: Peer
    since: float


class OpenHandshakes:
    """The connections that may not have finished their handshake, oldest first."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._clock = clock
        self._open: OrderedDict[int, _Handshake] = OrderedDict()  # by descriptor
        self._of_source: dict[str, OrderedDict[int, _Handshake]] = {}
        self.ended = 0

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int) -> None:
        """Count a new connection, and end the oldest handshakes above the bounds."""
        self.closed(descriptor)
        peer = self._connections.peer(descriptor)
        if peer is None:
            return
        now = self._clock()
        self._forget_old(now)
        of_source = self._of_source.setdefault(peer[0], OrderedDict())
        self._open[descriptor] = of_source[descriptor] = _Handshake(peer, now)
        self._shrink(of_source, MAX_HANDSHAKES_PER_SOURCE)
        self._shrink(self._open, MAX_HANDSHAKES)

    def closed(self, descriptor: int) -> None:
        """Forget a connection that has ended or finished its handshake."""
        found = self._open.pop(descriptor, None)
        if found is not None:
            source = found.peer[0]
            del self._of_source[source][descriptor]
            if not self._of_source[source]:
                del self._of_source[source]

    def _forget_old(self, now: float) -> None:
        """Forget handshakes older than HANDSHAKE_SECONDS, which libzmq has closed or which have finished."""
        while self._open:
            descriptor, oldest = next(iter(self._open.items()))
            if now - oldest.since <= HANDSHAKE_SECONDS:
                return
            self.closed(descriptor)

    def _shrink(self, among: OrderedDict[int, _Handshake], most: int) -> None:
        """End the oldest handshakes above `most`; connections that have finished theirs are only forgotten."""
        while len(among) > most:
            descriptor, oldest = next(iter(among.items()))
            received = self._connections.received(descriptor, oldest.peer)
            self.closed(descriptor)
            if received is not None and received < HANDSHAKE_BYTES:
                self._connections.end(descriptor, oldest.peer)
                self.ended += 1


class KernelConnections:
    """Reads connections by descriptor; libzmq may close one at any time, and the process may reuse its number.

    A duplicate keeps the descriptor open, and the peer's address and port confirm that it is the right connection.
    """

    def peer(self, descriptor: int) -> Peer | None:
        with self._duplicate(descriptor) as found:
            return None if found is None else _peer_of(found)

    def received(self, descriptor: int, peer: Peer) -> int | None:
        with self._duplicate(descriptor) as found:
            if found is None or _peer_of(found) != peer:
                return None
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            received: int = _BYTES_RECEIVED.unpack(info)[0]
            return received

    def end(self, descriptor: int, peer: Peer) -> None:
        with self._duplicate(descriptor) as found:
            if found is not None and _peer_of(found) == peer:
                with contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)

    @staticmethod
    @contextlib.contextmanager
    def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            yield None
            return
        try:
            found = socket.socket(fileno=duplicate)
        # The number is that of a file by now.
        except OSError:
            os.close(duplicate)
            yield None
            return
        with found:
            yield found


def _peer_of(connection: socket.socket) -> Peer | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        address, port, *_ = connection.getpeername()
    except OSError:
        return None
    return address, port


class HandshakeGuard:
    """Watches one TCP socket that is not bound yet. Close it before the socket.

    It takes the socket's only monitor: a second one would stop it. `disconnects` passes its events on to others.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        where = f"inproc://handshakes-{id(self)}"
        watched.monitor(where, _EVENTS)
        # Context.destroy closes all sockets of a context in the calling thread; this one must be closed by its own
        # thread.
        self._events = zmq.Context[zmq.Socket[bytes]].shadow(context.underlying).socket(zmq.PAIR)
        # Unbounded, since libzmq's I/O thread would block until there is room.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(where)
        self.handshakes = OpenHandshakes(KernelConnections())
        self._signal: DisconnectSignal | None = None
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    @property
    def disconnects(self) -> DisconnectSignal:
        """The signal that connections have ended, created when it is first requested."""
        if self._signal is None:
            self._signal = DisconnectSignal()
        return self._signal

    def close(self) -> None:
        self._watched.disable_monitor()
        self._thread.join()
        if self._signal is not None:
            self._signal.close()

    def _run(self) -> None:
        with self._events, contextlib.suppress(zmq.ContextTerminated):
            while True:
                event = parse_monitor_message(self._events.recv_multipart())
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self.handshakes.accepted(event["value"])
                else:
                    self.handshakes.closed(event["value"])
                    if self._signal is not None:
                        self._signal.notify()
