"""Two socket kinds: RouterSocket (many peers, addressed by routing id) and Dealer (one peer).

Messages arrive once and in order as long as both processes live (common.ipc.session), whatever happens to
connections; datagrams may be lost. Nothing blocks: a message that cannot be sent now is kept within bounds, or
refused with False. `drain()` returns what has arrived, bounded per call so that a flood cannot starve the loop. It
must be called a few times a second, since it sends acknowledgements and lost frames. ZMQ's descriptor is
edge-triggered: a loop that waits on `fileno()` must drain until `more` is False (RouterSocket) or nothing returns
(Dealer).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq

from common.errors import ConfigError, ProtocolError
from common.ipc.binding import bind, bind_problem
from common.ipc.curve import LinkSecurity, Plain, is_loopback, is_tcp
from common.ipc.disconnects import Disconnects, Monitored
from common.ipc.handshake_guard import HANDSHAKE_SECONDS, HandshakeGuard, OpenHandshakes
from common.ipc.inbound_filter import InboundFilter
from common.ipc.session import DATA, PACK, SMALL, Frame, pack, unpack
from common.ipc.sessions import Sessions

MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens is 5 MiB
HIGH_WATER_MARK = 10_000  # messages that wait for one peer, or for this process
QUEUED_BYTES = 512 << 20  # limit for large messages that one peer has not acknowledged
DRAIN_LIMIT = 1_000
BACKLOG = 1_024  # connections that the kernel holds until they are accepted
# No ZMQ heartbeats: their timer aborts the process (libzmq 4.3.5, assertion !_io_error) if a connection breaks whose
# input had stopped. Dealers probe and dial again after a silence; the kernel ends connections that no longer answer.
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,  # seconds
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 5_000,  # ms without the peer's kernel taking what was sent
}
# Flags of the parts of a message. As integers: arithmetic on ZMQ's enums costs more than sending a part.
NOT_LAST, LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
NOBLOCK = LAST
READABLE, EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
# Interval at which `drain` sends acknowledgements and probes that are due. An answer for which a peer waits is sent at
# once.
TEND_SECONDS = 0.02
# Time after close; without it a Goodbye that follows a burst of tokens is dropped half of the time.
LINGER_MS = 500


def check_bind(address: str, key: str, security: LinkSecurity) -> None:
    """Refuse addresses that other hosts can reach unless links have keys. `key` is the config key of the address."""
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


class Channel:
    """Common part of both kinds: options, lifetime, receiving and sending."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, received: int = HIGH_WATER_MARK
    ) -> None:
        self._socket = context.socket(kind)
        # Without pyzmq's own function around it, which only routing ids of SERVER and groups of RADIO sockets need.
        self._send_part = super(zmq.Socket, self._socket).send
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, received)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        for option, value in KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        # Times every deadline of this socket.
        self.clock: Callable[[], float] = time.monotonic

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The ZMQ socket, for pollers."""
        return self._socket

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def _receive(self, most: int = DRAIN_LIMIT) -> list[list[bytes]]:
        socket, messages = self._socket, list[list[bytes]]()
        # As InboundFilter reads: without an exception at the end, and by frames that know whether more follow.
        while len(messages) < most and int(socket.getsockopt(EVENTS)) & READABLE:
            frame = socket.recv(NOBLOCK, copy=False)
            parts = [frame.bytes]
            while frame.more:
                frame = socket.recv(NOBLOCK, copy=False)
                parts.append(frame.bytes)
            messages.append(parts)
        return messages

    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        try:
            for part in frames[:-1]:
                self._send_part(part, NOT_LAST)
            self._send_part(frames[-1], LAST)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the socket. The last messages have LINGER_MS to be sent; only `Context.term` waits for that."""
        self._socket.close()


def as_part(payload: bytes) -> bytes | zmq.Frame:
    """Return the payload as a message part; large ones are not copied, since the session keeps them anyway."""
    return payload if len(payload) < SMALL else zmq.Frame(payload, copy=False)


class RouterSocket(Channel):
    """Bound socket with many peers, each addressed by the identity of its Dealer.

    Attributes:
        more: True if `drain` has to be called again before the loop waits. That is so after a send, too: it may consume
            the edge of the descriptor that announces the next frame.
        bad: the bad frames: not allowed by their key, damaged, or refused by their reader.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        security: LinkSecurity | None = None,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        """Keep at most `queued_bytes` that one peer has not acknowledged.

        Raises ConfigError if the address cannot be bound, or another process serves it.
        """
        super().__init__(context, zmq.ROUTER)
        self._readable = False  # ZMQ has just said so
        self._unread = False  # the latest `drain` read as many frames as it may
        self.more = False
        self._tend_at = 0.0  # when sessions are looked after again
        self._bound_file: Path | None = None
        self._guard: HandshakeGuard | None = None
        self._disconnects: Disconnects | None = None
        self._sessions = Sessions(self._send_frame, HIGH_WATER_MARK, queued_bytes)
        try:
            identity_check = (security or Plain()).secure_server(self._socket, address)
            # An unreachable peer is an error, not silence.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A peer may reconnect before its disconnection was noticed.
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._filter = InboundFilter(self._socket, identity_check)
            self.bad = self._filter.bad
            if is_tcp(address):
                self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
                self._guard = HandshakeGuard(context, self._socket)
            self._bind(address)
        except ConfigError:
            self.close()
            raise
        except (zmq.ZMQError, OSError) as error:
            self.close()
            remedy = "choose another address"
            if address.startswith("ipc://"):
                remedy += " or, if it is in the run directory, set process.run_dir"
            raise ConfigError("", f"cannot bind {address}: {bind_problem(error)}; {remedy}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        if not address.startswith("ipc://"):
            bind(self._socket, address)
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
        """Number of frames that no peer can have sent like this, or that the network has changed."""
        return self._sessions.damaged

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Send now. Returns False if the peer cannot be reached or too much waits for it; then nothing is kept."""
        return self._keep(peer, payload, must_leave=True)

    def send_all(self, peer: bytes, payloads: Sequence[bytes]) -> bool:
        """Send messages now, in one frame. Returns False as `send` does; then none of them is kept."""
        if len(payloads) == 1:
            return self._keep(peer, payloads[0], must_leave=True)
        return self._keep(peer, pack(payloads), must_leave=True, kind=PACK)

    def post(self, peer: bytes, payload: bytes) -> bool:
        """Send now, or when the peer is connected again. Returns False if it is unknown or too much waits for it."""
        return self._keep(peer, payload, must_leave=False)

    def datagram(self, peer: bytes, payload: bytes) -> bool:
        """Send once, without any guarantee of delivery."""
        self.more = True
        return len(payload) <= MAX_MESSAGE_BYTES and self._send((self._filter.routes.to(peer), payload))

    def reachable(self, peer: bytes) -> bool:
        """Return whether the peer is connected, as far as ZMQ knows."""
        session = self._sessions.get(peer)
        return session is not None and self._send_frame(peer, session.probe(self.clock()))

    @property
    def handshakes(self) -> OpenHandshakes | None:
        """The connections that may not have finished their handshake; None unless this is a TCP socket."""
        return None if self._guard is None else self._guard.handshakes

    @property
    def disconnects(self) -> Disconnects:
        """The signal that connections of this socket have ended."""
        if self._disconnects is None:
            self._disconnects = Monitored(self._socket) if self._guard is None else self._guard.disconnects
        return self._disconnects

    def vouch_for(self, peer: bytes) -> None:
        """Keep this peer's session: no number of unknown peers can evict it."""
        self._sessions.vouch_for(peer)

    def vouch_only_for(self, peers: Iterable[bytes]) -> None:
        """Vouch for exactly these peers."""
        self._sessions.vouch_only_for(peers)

    def forget(self, peer: bytes) -> None:
        """Drop what waits for a peer that will not return."""
        self._sessions.forget(peer)

    def drain(self, most: int = DRAIN_LIMIT, signalled: bool = False) -> list[tuple[bytes, bytes]]:
        """Return (peer, message) pairs from at most `most` frames; bad frames are counted and dropped.

        `signalled`: the descriptor has just become readable, so that there is a frame almost always.
        """
        now = self.clock()
        if self._sessions.urgent or now >= self._tend_at:
            self._sessions.tend(now)
            self._tend_at = now + TEND_SECONDS
        self.more = False
        received = self._filter.receive(most, self._readable or signalled)
        self._readable = False
        self._unread = len(received) >= most
        messages: list[tuple[bytes, bytes]] = []
        for parts in received:
            peer = parts[0]
            if len(parts) == 3:
                damaged = self._sessions.damaged
                payload = self._sessions.receive(peer, parts[1], parts[2], now)
                if payload is None:
                    if self._sessions.damaged != damaged:
                        self.refuse(peer, "a damaged frame")
                elif parts[1][0] == PACK:
                    messages += self._unpacked(peer, payload)
                else:
                    messages.append((peer, payload))
            elif len(parts) == 2:
                messages.append((peer, parts[1]))
            elif len(parts) > 3:
                self.refuse(peer, f"a message of {len(parts) - 1} parts")
        if self._unread or self._sessions.urgent:
            self.more = True
        return messages

    def has_work(self) -> bool:
        """Return whether `drain` has something to do now, which costs less than a `drain` that finds nothing."""
        if self._unread or self._sessions.urgent:
            return True
        self.more = False
        self._readable = bool(int(self._socket.getsockopt(EVENTS)) & READABLE)
        return self._readable

    def refuse(self, peer: bytes, reason: str) -> None:
        """Count a bad frame of `peer`, log it at a bounded rate, and cut the peer off after too many."""
        self._filter.refuse(peer, reason)

    def take_cut_off(self) -> list[str]:
        """Return the peers cut off since the last call, as in BadFrames."""
        return self._filter.take_cut_off()

    def flush_log(self) -> None:
        """Log the summary of refused frames that is due."""
        if self._filter.bad.total:
            self.bad.flush()

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        elif self._disconnects is not None:
            self._disconnects.close()
        self._disconnects = None
        super().close()
        if self._bound_file is not None:
            # If the disk has become read-only, the next process replaces the file.
            with contextlib.suppress(OSError):
                self._bound_file.unlink()

    def _unpacked(self, peer: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        try:
            return [(peer, each) for each in unpack(payload)]
        except ProtocolError as error:
            self.refuse(peer, str(error))
            return []

    def _keep(self, peer: bytes, payload: bytes, must_leave: bool, kind: int = DATA) -> bool:
        session = self._sessions.get(peer)
        # A larger message would make the peer close the connection.
        if session is None or len(payload) > MAX_MESSAGE_BYTES:
            return False
        frame = session.keep(payload, self.clock(), kind)
        if frame is None:
            return False
        if not self._send_frame(peer, frame) and must_leave:
            session.take_back()
            return False
        self._sessions.mark(peer)
        return True

    def _send_frame(self, peer: bytes, frame: Frame) -> bool:
        header, payload = frame
        self.more = True
        part = payload if len(payload) < SMALL else as_part(payload)
        return self._send((self._filter.routes.to(peer), header, part))


def _remove_stale(file: Path) -> None:
    """Unlink the socket of a killed process; never that of a living one, nor a file that is not a socket."""
    if not file.exists():
        return
    if not file.is_socket():
        raise ConfigError("", f"{file} is in the way and not a socket; remove it or choose another address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(file))
        except ConnectionRefusedError:
            file.unlink(missing_ok=True)
            return
        # A process that is stopped accepts nobody, but it goes on later.
        except BlockingIOError:
            pass
    raise ConfigError("", f"another process serves {file}; stop it first")
