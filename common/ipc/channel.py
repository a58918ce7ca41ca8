"""Two socket kinds: RouterSocket (many peers, addressed by identity) and Dealer (one peer).

Both send without blocking (False when the bounded queue is full or the peer is gone), and `drain()` returns what has
arrived, bounded per call so that a flood cannot starve the loop. ZMQ's descriptor is edge-triggered: an event loop
that waits on `fileno()` must drain until `drain()` returns nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.errors import ConfigError
from common.ipc.backlog import LARGE, Backlog
from common.ipc.curve import LinkSecurity, Plain, is_loopback, is_tcp
from common.ipc.gate import Gate

MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens is 5 MiB
HIGH_WATER_MARK = 10_000  # messages
QUEUED_BYTES = 512 << 20  # of large messages, for one peer
DRAIN_LIMIT = 1_000
HEARTBEAT_MS = 1_000  # ZMQ's own: half-open TCP is noticed without traffic
HEARTBEAT_TIMEOUT_MS = 3_000
LINGER_MS = 500  # after close: without it a Goodbye behind a burst of tokens is dropped half of the time


def check_bind(address: str, key: str, security: LinkSecurity) -> None:
    """Refuse addresses that other hosts can reach unless links have keys. `key` names the config key."""
    if address.startswith(("ipc://@", "ipc://*")):
        raise ConfigError(
            key, f"{address} is a socket without a file, so without permissions: give it a path"
        )
    if not security.open_binds and is_tcp(address) and not is_loopback(address):
        raise ConfigError(
            key,
            f"{address} can be reached from other hosts, and the cluster has no keys: make some with deploy/keygen and "
            "name their directory in security.keys, or use a loopback address",
        )


class _Channel:
    """What both kinds share: options, lifetime, draining."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, received: int = HIGH_WATER_MARK
    ) -> None:
        self._socket = context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, received)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._bound_file: Path | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For pollers."""
        return self._socket

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def _receive(self, most: int = DRAIN_LIMIT) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        while len(messages) < most:
            try:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages

    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        if len(frames[-1]) > MAX_MESSAGE_BYTES:  # the peer would close the connection over it
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        """What was sent last gets LINGER_MS to leave; nothing here waits for it, `Context.term` does."""
        self._socket.close()
        if self._bound_file is not None:
            self._bound_file.unlink(missing_ok=True)


class RouterSocket(_Channel):
    """Bound socket with many peers. A peer's identity is what its Dealer chose."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        security: LinkSecurity | None = None,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        """At most `queued_bytes` wait for one peer.

        Raises ConfigError when the address cannot be bound, or another process serves it.
        """
        super().__init__(context, zmq.ROUTER)
        self._backlog = Backlog(queued_bytes)
        self._gate: Gate | None = None
        try:
            self._gate = (security or Plain()).secure_server(self._socket, address)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error, not silence
            self._socket.setsockopt(
                zmq.ROUTER_HANDOVER, 1
            )  # a peer that reconnects before its death was seen
            self._bind(address)
        except ConfigError:
            self.close()
            raise
        except (zmq.ZMQError, OSError) as error:
            self.close()
            reason = error.strerror or error
            raise ConfigError("", f"cannot bind {address}: {reason}; choose another address") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        if not address.startswith("ipc://"):
            self._socket.bind(address)
            return
        file = Path(address.removeprefix("ipc://"))
        _remove_stale(file)
        previous = os.umask(0o177)
        try:
            self._socket.bind(address)
        finally:
            os.umask(previous)
        self._bound_file = file

    def send(self, peer: bytes, frame: bytes) -> bool:
        nbytes = len(frame)
        if nbytes < LARGE:
            return self._send((peer, frame))
        if not self._backlog.admits(peer, nbytes):
            return False
        tracked = zmq.Frame(frame, track=True, copy=False)
        sent = self._send((peer, tracked))
        if sent:
            self._backlog.add(peer, tracked.tracker, nbytes)
        return sent

    def drain(self) -> list[tuple[bytes, bytes]]:
        """(peer identity, frame) of everything that has arrived; malformed multiparts are dropped."""
        return [(parts[0], parts[1]) for parts in self._receive() if len(parts) == 2]

    @property
    def refused(self) -> int:
        """Messages of connections whose key does not belong to the routing id."""
        return 0 if self._gate is None else self._gate.refused

    def _receive(self, most: int = DRAIN_LIMIT) -> list[list[bytes]]:
        """Everything that has arrived and comes from who it claims to come from."""
        gate = self._gate
        if gate is None:
            return super()._receive(most)
        messages: list[list[bytes]] = []
        for _ in range(most):
            try:
                identity = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            parts = [identity.bytes, *self._socket.recv_multipart()]
            if gate.admits(parts[0], identity):
                messages.append(parts)
        return messages


def _remove_stale(file: Path) -> None:
    """Unlink the socket of a process that was killed; never that of a living one, nor a file that is no socket."""
    if not file.exists():
        return
    if not file.is_socket():
        raise ConfigError("", f"{file} is in the way and not a socket; remove it or choose another address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(file))
        except ConnectionRefusedError:
            file.unlink(missing_ok=True)
            return
    raise ConfigError("", f"another process serves {file}; stop it first")


class Dealer(_Channel):
    """Connected socket with one peer; reconnects by itself."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        server: str = "",
        security: LinkSecurity | None = None,
        received: int = HIGH_WATER_MARK,
    ) -> None:
        """`server` names the process at `address`, whose key is checked; `received` messages wait here at most.

        Raises ConfigError.
        """
        super().__init__(context, zmq.DEALER, received)
        try:
            (security or Plain()).secure_client(self._socket, address, server)
            self._socket.setsockopt(zmq.IDENTITY, identity)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
            self._socket.connect(address)
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("", f"cannot connect to {address}: {error.strerror or error}") from error

    def send(self, frame: bytes) -> bool:
        return self._send((frame,))

    def drain(self, most: int = DRAIN_LIMIT) -> list[bytes]:
        """At most so many of what has arrived; malformed multiparts are dropped."""
        return [parts[0] for parts in self._receive(most) if len(parts) == 1]
