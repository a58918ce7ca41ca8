"""The sessions of a listening socket, by peer. The table is bounded: the longest silent peer leaves first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common.errors import ProtocolError
from common.ipc.session import Frame, Kind, Session, frame, read_header

MAX_SESSIONS = 4_096
FORGET_SECONDS = 120.0  # without a word from a peer that cannot be reached


class Sessions:
    """Owned by one socket. `send(peer, frame)` never blocks; False where it was not taken."""

    def __init__(self, send: Callable[[bytes, Frame], bool], max_frames: int, max_bytes: int) -> None:
        """`max_frames` and `max_bytes` as in Session, for each peer."""
        self._send = send
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._sessions: dict[bytes, Session] = {}
        self._active: set[bytes] = set()  # those that `tend` looks at
        self.damaged = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, peer: bytes) -> Session | None:
        return self._sessions.get(peer)

    def mark(self, peer: bytes) -> None:
        """Something of this peer waits for time to pass."""
        self._active.add(peer)

    def forget(self, peer: bytes) -> None:
        """Drop what is not acknowledged. A peer that lives is told of it by the answer to its next frame."""
        self._sessions.pop(peer, None)
        self._active.discard(peer)

    def receive(self, peer: bytes, header: bytes, payload: bytes, now: float) -> bytes | None:
        """The payload of the next DATA frame, or None for everything else."""
        try:
            head = read_header(header, payload)
        except ProtocolError:
            self.damaged += 1
            return None
        session = self._sessions.get(peer)
        if session is None or session.epoch != head.epoch:
            if head.kind is not Kind.OPEN:
                if head.kind is not Kind.RESET:
                    self._send(peer, frame(Kind.RESET, head.epoch, 0, 0))
                return None
            session = self._open(peer, head.epoch, now)
        delivered = session.receive(head, payload, now)
        self._active.add(peer)
        return delivered

    def tend(self, now: float) -> None:
        """Send what is due: acknowledgements, probes, lost frames."""
        for peer in list(self._active):
            session = self._sessions[peer]
            for each in session.due(now):
                if not self._send(peer, each):
                    if now - session.heard_at > FORGET_SECONDS:
                        self.forget(peer)
                    break
            if session.idle:
                self._active.discard(peer)

    def _open(self, peer: bytes, epoch: int, now: float) -> Session:
        self.forget(peer)
        if len(self._sessions) >= MAX_SESSIONS:
            self.forget(min(self._sessions, key=lambda each: self._sessions[each].heard_at))
        session = Session(epoch, False, self._max_frames, self._max_bytes, now)
        self._sessions[peer] = session
        return session
