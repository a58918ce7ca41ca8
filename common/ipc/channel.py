"""Two socket kinds: RouterSocket (many peers, addressed by routing id) and Dealer (one peer).

Messages arrive once and in order as long as both processes live (common.ipc.session), whatever happens to connections;
datagrams arrive or do not. Nothing blocks: what cannot be sent now is kept within bounds, or refused with False.
`drain()` returns what has arrived, bounded per call so that a flood cannot starve the loop. It has to be called a few
times a second: acknowledgements leave then, and lost frames are sent again. ZMQ's descriptor is edge-triggered: a
loop that waits on `fileno()` must drain until `more` is False (RouterSocket) or nothing returns (Dealer).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.errors import ConfigError, ProtocolError
from common.ipc.connection_watch import ConnectionWatch
from common.ipc.curve import LinkSecurity, Plain, is_loopback, is_tcp
from common.ipc.inbound_filter import InboundFilter
from common.ipc.session import SMALL, Frame, Kind, Session, read_header
from common.ipc.sessions import Sessions

MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens is 5 MiB
HIGH_WATER_MARK = 10_000  # messages that wait for one peer, or for us
QUEUED_BYTES = 512 << 20  # of large messages that one peer has not acknowledged
DRAIN_LIMIT = 1_000
HEARTBEAT_MS = 1_000  # ZMQ's own: half-open TCP is noticed without traffic
HEARTBEAT_TIMEOUT_MS = 3_000
REDIAL_SECONDS = 0.75  # without a connection: then it is dialled anew
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
        self._clock = time.monotonic

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


def _payload(payload: bytes) -> bytes | zmq.Frame:
    """Large ones are not copied: the session keeps them anyway."""
    return payload if len(payload) < SMALL else zmq.Frame(payload, copy=False)


class RouterSocket(_Channel):
    """Bound socket with many peers. A peer's routing id is what its Dealer chose."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        security: LinkSecurity | None = None,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        """At most `queued_bytes` wait for the acknowledgement of one peer.

        Raises ConfigError when the address cannot be bound, or another process serves it.
        """
        super().__init__(context, zmq.ROUTER)
        self.more = False  # the latest `drain` ended at its bound
        self._bound_file: Path | None = None
        self._sessions = Sessions(self._send_frame, HIGH_WATER_MARK, queued_bytes)
        try:
            gate = (security or Plain()).secure_server(self._socket, address)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error, not silence
            self._socket.setsockopt(
                zmq.ROUTER_HANDOVER, 1
            )  # a peer that reconnects before its death was seen
            self._filter = InboundFilter(self._socket, gate)
            self._bind(address)
        except ConfigError:
            self.close()
            raise
        except (zmq.ZMQError, OSError) as error:
            self.close()
            reason = error.strerror or error
            remedy = "choose another address"
            if address.startswith("ipc://"):
                remedy += " or, if it lies in the run directory, set process.run_dir"
            raise ConfigError("", f"cannot bind {address}: {reason}; {remedy}") from error
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

    @property
    def damaged(self) -> int:
        """Frames so far that no peer of ours has sent so, or that the network has changed."""
        return self._sessions.damaged

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Send now. False: the peer cannot be reached, or too much waits for it; then nothing is kept."""
        return self._keep(peer, payload, must_leave=True)

    def post(self, peer: bytes, payload: bytes) -> bool:
        """Send now, or when the peer is connected again. False: it was never heard, or too much waits for it."""
        return self._keep(peer, payload, must_leave=False)

    def datagram(self, peer: bytes, payload: bytes) -> bool:
        """Send now, once, at the network's mercy."""
        return len(payload) <= MAX_MESSAGE_BYTES and self._send((peer, payload))

    def reachable(self, peer: bytes) -> bool:
        """Whether the peer is connected, as far as ZMQ knows."""
        session = self._sessions.get(peer)
        return session is not None and self._send_frame(peer, session.probe(self._clock()))

    def forget(self, peer: bytes) -> None:
        """The peer is gone for good: drop what waits for it."""
        self._sessions.forget(peer)

    def drain(self, most: int = DRAIN_LIMIT) -> list[tuple[bytes, bytes]]:
        """(routing id, message) of at most `most` frames that have arrived; bad ones are counted and dropped.

        `more` says whether there may be more.
        """
        now = self._clock()
        self._sessions.tend(now)
        received = self._filter.receive(most)
        self.more = len(received) == most
        messages: list[tuple[bytes, bytes]] = []
        for peer, *parts in received:
            if len(parts) == 1:
                messages.append((peer, parts[0]))
            elif len(parts) == 2:
                damaged = self._sessions.damaged
                payload = self._sessions.receive(peer, parts[0], parts[1], now)
                if payload is not None:
                    messages.append((peer, payload))
                elif self._sessions.damaged != damaged:
                    self.refuse(peer, "a damaged frame")
            elif parts:
                self.refuse(peer, f"a message of {len(parts)} parts")
        return messages

    @property
    def refused(self) -> int:
        """Bad frames so far: of keys that may not say so, damaged, or refused by who read them."""
        return self._filter.bad.total

    def refuse(self, peer: bytes, reason: str) -> None:
        """Count a bad frame of `peer`, log it at a bounded rate, and cut the peer off after too many."""
        self._filter.refuse(peer, reason)

    def take_cut_off(self) -> list[str]:
        """NAME/INCARNATION, or NAME for a misused key, of the peers that were cut off since the last call."""
        return self._filter.take_cut_off()

    def flush_log(self) -> None:
        """Log the summary of refused frames that is due."""
        self._filter.bad.flush()

    def close(self) -> None:
        super().close()
        if self._bound_file is not None:
            with contextlib.suppress(
                OSError
            ):  # on a disk that is read-only by now, the next process replaces it
                self._bound_file.unlink()

    def _keep(self, peer: bytes, payload: bytes, must_leave: bool) -> bool:
        session = self._sessions.get(peer)
        if session is None or len(payload) > MAX_MESSAGE_BYTES:  # over it the peer would close the connection
            return False
        frame = session.keep(payload, self._clock())
        if frame is None:
            return False
        if not self._send_frame(peer, frame) and must_leave:
            session.take_back()
            return False
        self._sessions.mark(peer)
        return True

    def _send_frame(self, peer: bytes, frame: Frame) -> bool:
        header, payload = frame
        return self._send((peer, header, _payload(payload)))


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
        opens: bool = True,
        silence_ms: int | None = None,
    ) -> None:
        """`server` names the process at `address`, whose key is checked; `received` messages wait here at most.
        Without `opens` there are only datagrams. A connection that is silent for about `silence_ms` (default:
        HEARTBEAT_TIMEOUT_MS) is made anew.

        Raises ConfigError.
        """
        super().__init__(context, zmq.DEALER, received)
        # how often the peer turned out to be another process, or to have forgotten this one; what waited was dropped
        self.resets = 0
        self._opens = opens
        self._address = address
        self._dialled_at = self._clock()
        self._session = self._new_session()
        self._watch = ConnectionWatch(self._socket, address, self._clock())
        try:
            (security or Plain()).secure_client(self._socket, address, server)
            self._socket.setsockopt(zmq.IDENTITY, identity)
            if silence_ms is not None:
                self._socket.setsockopt(zmq.HEARTBEAT_IVL, silence_ms // 4)
                self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
            self._socket.connect(address)
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("", f"cannot connect to {address}: {error.strerror or error}") from error
        self._tend(self._clock())

    def send(self, payload: bytes) -> bool:
        """Send now, or when there is a connection. False: too much waits."""
        if len(payload) > MAX_MESSAGE_BYTES:
            return False
        frame = self._session.keep(payload, self._clock())
        if frame is None:
            return False
        self._send_frame(frame)
        return True

    def datagram(self, payload: bytes) -> bool:
        """Send once, at the network's mercy."""
        return len(payload) <= MAX_MESSAGE_BYTES and self._send((payload,))

    def disconnected_for(self) -> float:
        """Seconds since there was a connection; 0 while there is one."""
        now = self._clock()
        self._look_at_connection(now)
        return self._watch.disconnected_for(now)

    def drain(self, most: int = DRAIN_LIMIT) -> list[bytes]:
        """At most so many of the messages that have arrived; malformed multiparts are dropped."""
        messages: list[bytes] = []
        while not messages:
            now = self._clock()
            self._look_at_connection(now)
            self._tend(now)
            received = self._receive(most)
            if not received:
                break
            for parts in received:
                if len(parts) == 1:
                    messages.append(parts[0])
                elif len(parts) == 2:
                    payload = self._take(parts[0], parts[1], now)
                    if payload is not None:
                        messages.append(payload)
        return messages

    def close(self) -> None:
        self._watch.close()
        super().close()

    def _take(self, header: bytes, payload: bytes, now: float) -> bytes | None:
        try:
            head = read_header(header, payload)
        except ProtocolError:
            return None
        if head.epoch != self._session.epoch:
            return None
        if head.kind is not Kind.RESET:
            return self._session.receive(head, payload, now)
        if self._session.established:  # else it did not hear OPEN, which is repeated
            self.resets += 1
            self._session = self._new_session()
        return None

    def _look_at_connection(self, now: float) -> None:
        if self._watch.reconnected(now) and self._opens:
            self._send_frame(self._session.probe(now))
        if self._watch.disconnected_for(now) > REDIAL_SECONDS and now - self._dialled_at > REDIAL_SECONDS:
            self._dialled_at = now
            self._redial()

    def _redial(self) -> None:
        """ZMQ connects anew by itself after an error of the network, but never after bytes that it cannot read."""
        with contextlib.suppress(zmq.ZMQError):  # ENOENT: it has given the connection up
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def _tend(self, now: float) -> None:
        if self._opens:
            for frame in self._session.due(now):
                if not self._send_frame(frame):
                    break

    def _send_frame(self, frame: Frame) -> bool:
        return self._send((frame[0], _payload(frame[1])))

    def _new_session(self) -> Session:
        return Session(secrets.randbits(64), True, HIGH_WATER_MARK, QUEUED_BYTES, self._clock())
