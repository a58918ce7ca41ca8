"""Proof across hosts that a sending process is gone: a TCP connection that it opens, and that only its end closes.

    sender -> receiver   once: id of the key, HMAC-SHA256(key, a constant); then nothing, ever

The kernel of a process that ends sends FIN, one that does not know the connection any more answers RST: either
proves the end. Silence proves nothing, and neither does a timeout: a peer behind a broken network may still
write, once it is mended. A host that lost its power proves it when it is up again, unless the connection has timed
out by then, two hours later: what it held stays in quarantine as long as this process runs.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from common.errors import HandshakeRefused
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.kind import TcpDescription

GRACE: Final = 2.0  # seconds: what the dead process's kernel and network card still hold has landed by then
_NONCE: Final = b"tandem lifeline"
_CONNECT_SECONDS: Final = 2.0
_REFUSED_SECONDS: Final = 10.0  # during which a place that did not answer is not asked again: asking waits
_LOOK_SECONDS: Final = 0.02
_PROOF_SECONDS: Final = 10.0
_MAX_STRANGERS: Final = 64
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 127))


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: socket.socket
    since: float
    proof: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Line:
    """What is known of one sender."""

    key: bytes
    sock: socket.socket | None = None
    ended_at: float | None = None


class LifelineKeeper:
    """Receiving side: listens on host:port (0: any). One thread; looks only when asked."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self._host = host
        self._port = int(self._listener.getsockname()[1])
        self._clock = clock
        self._looked_at = -_LOOK_SECONDS
        self._lines: dict[str, _Line] = {}
        self._strangers: list[_Stranger] = []

    def describe(self, incarnation: str) -> TcpDescription:
        """Where this sender is to connect, and its key."""
        line = self._lines.setdefault(incarnation, _Line(secrets.token_bytes(tcp_frames.KEY_BYTES)))
        return TcpDescription(self._host, self._port, line.key)

    def dead(self, incarnation: str) -> bool:
        """True only once the process has ended, and what was on the way has had time to land."""
        self._look()
        line = self._lines.get(incarnation)
        return line is not None and line.ended_at is not None and self._clock() - line.ended_at >= GRACE

    def forget(self, incarnation: str) -> None:
        line = self._lines.pop(incarnation, None)
        if line is not None and line.sock is not None:
            line.sock.close()

    def close(self) -> None:
        for incarnation in list(self._lines):
            self.forget(incarnation)
        for stranger in self._strangers:
            stranger.sock.close()
        self._strangers.clear()
        self._listener.close()

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        with contextlib.suppress(OSError):
            while len(self._strangers) < _MAX_STRANGERS:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._strangers.append(_Stranger(sock, now))
        for stranger in list(self._strangers):
            self._meet(stranger, now)
        for line in self._lines.values():
            if line.sock is None:
                continue
            try:
                if not _ended(line.sock):
                    continue
                line.ended_at = now
            except OSError:  # lost: read once more it would look like an end
                pass
            line.sock.close()
            line.sock = None  # the peer may connect anew

    def _meet(self, stranger: _Stranger, now: float) -> None:
        wanted = tcp_frames.PROOF.size - len(stranger.proof)
        try:
            part = stranger.sock.recv(wanted)
        except BlockingIOError:
            if now - stranger.since < _PROOF_SECONDS:
                return
            part = b""
        except OSError:
            part = b""
        stranger.proof += part
        if part and len(part) < wanted:
            return
        self._strangers.remove(stranger)
        line = self._owner(bytes(stranger.proof)) if part else None
        if line is None or line.sock is not None:  # a second one of the same key proves nothing by its end
            stranger.sock.close()
            return
        stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            stranger.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        line.sock, line.ended_at = stranger.sock, None

    def _owner(self, proof: bytes) -> _Line | None:
        lines = self._lines.values()
        return next((line for line in lines if tcp_frames.proves(proof, line.key, _NONCE)), None)


def _ended(sock: socket.socket) -> bool:
    """FIN or RST has come. Raises OSError, once, where the connection timed out, which proves nothing."""
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


class Lifelines:
    """Sending side: one connection per decode node that was ever written to and lives; closed by the process's end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._socks: dict[TcpDescription, socket.socket] = {}
        self._refused: dict[tuple[str, int], tuple[float, str]] = {}  # when, and why

    def hold(self, description: TcpDescription) -> None:
        """Connect, unless connected. Waits for it; raises HandshakeRefused where that fails."""
        for known, sock in list(self._socks.items()):
            if _unusable(sock):  # that decode node is gone, or out of reach
                sock.close()
                del self._socks[known]
        if description in self._socks:
            return
        where, now = (description.host, description.port), self._clock()
        self._refused = {at: told for at, told in self._refused.items() if now - told[0] < _REFUSED_SECONDS}
        if where in self._refused:
            raise HandshakeRefused(self._refused[where][1])
        try:
            sock = socket.create_connection(where, timeout=_CONNECT_SECONDS)
        except OSError as error:
            reason = (
                f"{where[0]}:{where[1]} (decode.nodes[].host and bulk_port), by whose end it would see that this "
                f"prefill node is gone, cannot be reached ({error})"
            )
            self._refused[where] = (self._clock(), reason)
            raise HandshakeRefused(reason) from None
        try:
            sock.sendall(tcp_frames.proof(description.key, _NONCE))
        except OSError as error:
            sock.close()
            raise HandshakeRefused(f"{where[0]}:{where[1]} does not listen ({error})") from None
        sock.setblocking(False)
        self._socks[description] = sock

    def close(self) -> None:
        """Says that this process writes no more."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()
