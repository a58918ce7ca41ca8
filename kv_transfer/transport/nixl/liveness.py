"""Proof across hosts that a sending process has ended: a TCP connection that only the end of the process closes.

    receiver -> sender   challenge: a fresh nonce
    sender -> receiver   proof: id of the key, HMAC-SHA256(key, the nonce); nothing follows, ever

A recorded proof is worthless: a replay gets another nonce.

The kernel of a process that ends sends FIN; a kernel that no longer knows the connection answers RST. Either
proves the end. Silence proves nothing, and neither does a timeout: a peer that a network failure cuts off may
write again once the network is repaired. A host that lost power proves it when it is up again, unless the
connection has timed out by then, two hours later: what the host may have been writing to stays in quarantine as
long as this process runs.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from common.errors import HandshakeRefused
from common.exhaustion import EXHAUSTED, RETRY_SECONDS
from kv_transfer.transport.nixl.lookup import addresses_of
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.kind import TcpDescription
from kv_transfer.transport.tcp.listener import listening_socket

GRACE: Final = 2.0  # seconds after which writes of the dead process's kernel and network card have landed
CONNECT_SECONDS: Final = 2.0
# An address that did not answer is not tried again for this long, since trying blocks.
_REFUSED_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2  # interval of the check for overdue proofs
_PROOF_SECONDS: Final = 10.0
MAX_PENDING: Final = 64
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 127))


@dataclass(slots=True, eq=False)
class _PendingConnection:
    sock: socket.socket
    since: float
    nonce: bytes
    proof: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Sender:
    """The state of one sender."""

    key: bytes
    sock: socket.socket | None = None
    ended_at: float | None = None


class LivenessListener:
    """Receiving side: listens on host:port (0: any). A thread authenticates connections and detects their end."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = listening_socket(host, port)
        self._host = host
        self._port = int(self._listener.getsockname()[1])
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields that follow
        self._senders: dict[str, _Sender] = {}
        self._pending: list[_PendingConnection] = []
        self._accepts_from = -math.inf  # by the clock; later after descriptors have run out
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-liveness", daemon=True)
        self._thread.start()

    def describe(self, incarnation: str) -> TcpDescription:
        """Return the address that this sender must connect to, and its key."""
        with self._lock:
            sender = self._senders.setdefault(incarnation, _Sender(secrets.token_bytes(tcp_frames.KEY_BYTES)))
        return TcpDescription(self._host, self._port, sender.key)

    def dead(self, incarnation: str) -> bool:
        """Return True only once the process has ended and its outstanding writes have had time to land."""
        with self._lock:
            sender = self._senders.get(incarnation)
            return (
                sender is not None
                and sender.ended_at is not None
                and self._clock() - sender.ended_at >= GRACE
            )

    @property
    def pending(self) -> int:
        """Number of connections that have not proved their key yet."""
        return len(self._pending)

    def connected(self, incarnation: str) -> bool:
        """Return whether this sender's connection is open and has proved its key."""
        with self._lock:
            sender = self._senders.get(incarnation)
            return sender is not None and sender.sock is not None

    def ended(self, incarnation: str) -> bool:
        """Return whether this sender's connection has ended: GRACE later, the sender counts as dead."""
        with self._lock:
            sender = self._senders.get(incarnation)
            return sender is not None and sender.ended_at is not None

    def poll(self) -> None:
        """Process what has arrived, without waiting."""
        with self._lock:
            self._process(self._clock())

    def forget(self, incarnation: str) -> None:
        with self._lock:
            sender = self._senders.pop(incarnation, None)
            if sender is not None and sender.sock is not None:
                sender.sock.close()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for incarnation in list(self._senders):
            self.forget(incarnation)
        for pending in self._pending:
            pending.sock.close()
        self._pending.clear()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            poller = select.poll()
            with self._lock:
                if self._clock() >= self._accepts_from:
                    poller.register(self._listener, select.POLLIN)
                socks = [sender.sock for sender in self._senders.values() if sender.sock is not None]
                for sock in (*socks, *(pending.sock for pending in self._pending)):
                    poller.register(sock, select.POLLIN)
            poller.poll(_LOOK_SECONDS * 1000)
            self.poll()

    def _process(self, now: float) -> None:
        """Process connections without waiting. A socket that was closed since the poll is only read once more."""
        if now >= self._accepts_from:
            self._accept(now)
        for pending in list(self._pending):
            self._authenticate(pending, now)
        for sender in self._senders.values():
            if sender.sock is None:
                continue
            try:
                if not _ended(sender.sock):
                    continue
                sender.ended_at = now
            except OSError:
                pass  # the connection timed out; a second read would look like an end
            sender.sock.close()
            sender.sock = None  # the peer may connect again

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._accepts_from = now + RETRY_SECONDS
            return
        self._challenge(sock, now)

    def _challenge(self, sock: socket.socket, now: float) -> None:
        if len(self._pending) >= MAX_PENDING:
            # The oldest has had time for its proof, and a sender that connects during a flood of others gets time
            # too.
            self._pending.pop(0).sock.close()
        sock.setblocking(False)
        pending = _PendingConnection(sock, now, secrets.token_bytes(tcp_frames.NONCE_BYTES))
        self._pending.append(pending)
        with contextlib.suppress(OSError):  # a lost connection is detected when it is read
            sock.send(tcp_frames.CHALLENGE.pack(tcp_frames.CHALLENGE_MAGIC, pending.nonce))

    def _authenticate(self, pending: _PendingConnection, now: float) -> None:
        wanted = tcp_frames.PROOF.size - len(pending.proof)
        try:
            part = pending.sock.recv(wanted)
        except BlockingIOError:
            if now - pending.since < _PROOF_SECONDS:
                return
            part = b""
        except OSError:
            part = b""
        pending.proof += part
        if part and len(part) < wanted:
            return
        self._pending.remove(pending)
        sender = self._owner(pending) if part else None
        # The end of a second connection with the same key would prove nothing.
        if sender is None or sender.sock is not None:
            pending.sock.close()
            return
        pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            pending.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sender.sock, sender.ended_at = pending.sock, None

    def _owner(self, pending: _PendingConnection) -> _Sender | None:
        proof = bytes(pending.proof)
        senders = self._senders.values()
        return next(
            (sender for sender in senders if tcp_frames.proves(proof, sender.key, pending.nonce)), None
        )


def _ended(sock: socket.socket) -> bool:
    """Return whether FIN or RST has arrived. Raises OSError once if the connection timed out, which proves nothing."""
    try:
        return sock.recv(64) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _unusable(sock: socket.socket) -> bool:
    try:
        return _ended(sock)
    except OSError:
        return True


class LivenessConnections:
    """Sending side: one connection per living decode node that was ever written to, closed at process exit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._socks: dict[TcpDescription, socket.socket] = {}
        self._refused: dict[tuple[str, int], tuple[float, str]] = {}  # when, and why

    def __len__(self) -> int:
        return len(self._socks)

    def hold(self, description: TcpDescription) -> None:
        """Connect unless connected, and wait for it.

        Raises HandshakeRefused if that fails, OSError if this process lacks descriptors or memory.
        """
        for known, sock in list(self._socks.items()):
            if _unusable(sock):  # that decode node has ended or cannot be reached
                sock.close()
                del self._socks[known]
        if description in self._socks:
            return
        where, now = (description.host, description.port), self._clock()
        self._refused = {at: each for at, each in self._refused.items() if now - each[0] < _REFUSED_SECONDS}
        if where in self._refused:
            raise HandshakeRefused(self._refused[where][1])
        try:
            self._socks[description] = _connect(where, description.key)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            reason = (
                f"{where[0]}:{where[1]} (decode.nodes[].host and bulk_port), the connection by which the decode node "
                f"detects the end of this prefill node, cannot be reached ({error})"
            )
            self._refused[where] = (self._clock(), reason)
            raise HandshakeRefused(reason) from None

    def close(self) -> None:
        """Close all connections, which says that this process writes nothing more."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()


def _connection(host: str, others: Sequence[str], port: int) -> socket.socket:
    """Return a connection to the first of these addresses that accepts one, all within CONNECT_SECONDS."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.001))
        except OSError:
            if not others:
                raise
            host, *others = others


def _connect(where: tuple[str, int], key: bytes) -> socket.socket:
    """Return a connection that has answered the challenge.

    Waits at most LOOKUP_SECONDS and twice CONNECT_SECONDS; raises OSError.
    """
    host, *others = addresses_of(where[0])
    deadline = time.monotonic() + 2 * CONNECT_SECONDS
    sock = _connection(host, others, where[1])
    try:
        challenge = b""
        while missing := tcp_frames.CHALLENGE.size - len(challenge):
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            part = sock.recv(missing)
            if not part:
                raise ConnectionError("the decode node closed the connection without a challenge")
            challenge += part
        magic, nonce = tcp_frames.CHALLENGE.unpack(challenge)
        if magic != tcp_frames.CHALLENGE_MAGIC:
            raise ConnectionError("the listener at this address is not a decode node of this version")
        sock.sendall(tcp_frames.proof(key, nonce))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
