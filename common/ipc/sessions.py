"""The sessions of a listening socket, by peer. The table is bounded: the peer that was silent longest leaves first.

Peers that the owner vouches for stay, so a flood of others cannot evict them. A process may open many sessions
under its NAME, which its key proves, but it evicts only its own.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from common.errors import ProtocolError
from common.ipc.session import MAX_OPENING, Frame, FrameKind, Session, frame, read_header
from common.messages.identity import name_in

MAX_SESSIONS = 4_096
SESSIONS_OF_A_NAME = 64  # links of a process, and of earlier ones whose end was not noticed
FORGET_SECONDS = 120.0  # without a frame from a peer that cannot be reached
UNVOUCHED_SECONDS = 10.0  # the same for a peer that nobody vouches for


class Sessions:
    """Owned by one socket. `send(peer, frame)` never blocks and returns False if the frame was not accepted."""

    def __init__(self, send: Callable[[bytes, Frame], bool], max_frames: int, max_bytes: int) -> None:
        """`max_frames` and `max_bytes` are limits per peer, as in Session."""
        self._send = send
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # the peer silent for longest first
        self._of_name: dict[str, OrderedDict[bytes, None]] = {}  # each in the order of _sessions
        self._vouched: set[bytes] = set()
        self._active: set[bytes] = set()  # peers that `tend` has to process
        self._latest: bytes | None = None  # the peer heard last, which both orders end with
        # The latest session's; begins at random, so that the openings of an earlier process differ from this one's.
        self._opening = secrets.randbelow(MAX_OPENING)
        self.get: Callable[[bytes], Session | None] = self._sessions.get
        # Notes that something of a peer depends on time, so `tend` has to process it.
        self.mark: Callable[[bytes], None] = self._active.add
        self.damaged = 0
        self.urgent = False  # some peer waits for an answer: `tend` is due at once

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def names(self) -> set[str]:
        """The names that have a session."""
        return set(self._of_name)

    def vouch_for(self, peer: bytes) -> None:
        """Keep this peer's session until `forget`, or until the peer opens another: the owner knows the peer."""
        if peer in self._sessions:
            self._vouched.add(peer)

    def vouch_only_for(self, peers: Iterable[bytes]) -> None:
        """Vouch for exactly these peers."""
        self._vouched = {peer for peer in peers if peer in self._sessions}

    def forget(self, peer: bytes) -> None:
        """Drop what is not acknowledged. A living peer learns of it from the answer to its next frame."""
        if self._sessions.pop(peer, None) is not None:
            name = name_in(peer)
            del self._of_name[name][peer]
            if not self._of_name[name]:
                del self._of_name[name]
        self._vouched.discard(peer)
        self._active.discard(peer)

    def receive(self, peer: bytes, header: bytes, payload: bytes, now: float) -> bytes | None:
        """Return the payload if this is the next DATA or PACK frame, else None. That of a PACK is still packed."""
        try:
            head = read_header(header, payload)
        except ProtocolError:
            self.damaged += 1
            return None
        session = self._sessions.get(peer)
        if session is None or not session.continues(head):
            if head.kind is not FrameKind.OPEN:
                if head.kind is not FrameKind.RESET:
                    self._send(peer, frame(FrameKind.RESET, head.epoch, 0, 0))
                return None
            session = self._open(peer, head.epoch, now)
        elif peer != self._latest:
            self._sessions.move_to_end(peer)
            self._of_name[name_in(peer)].move_to_end(peer)
        self._latest = peer
        delivered = session.receive(head, payload, now)
        self.urgent = self.urgent or session.owes_answer
        self._active.add(peer)
        return delivered

    def tend(self, now: float) -> None:
        """Send what is due: acknowledgements, probes, lost frames."""
        self.urgent = False
        for peer in list(self._active):
            session = self._sessions[peer]
            limit = FORGET_SECONDS if peer in self._vouched else UNVOUCHED_SECONDS
            for each in session.due(now):
                if not self._send(peer, each):
                    if now - session.heard_at > limit:
                        self.forget(peer)
                    break
            if session.idle:
                self._active.discard(peer)

    def _open(self, peer: bytes, epoch: int, now: float) -> Session:
        self.forget(peer)
        name = name_in(peer)
        if len(self._of_name.get(name, ())) >= SESSIONS_OF_A_NAME:
            self._make_room(self._of_name[name])
        if len(self._sessions) >= MAX_SESSIONS:
            self._make_room(self._sessions)
        self._opening = self._opening % MAX_OPENING + 1
        session = Session(epoch, self._opening, self._max_frames, self._max_bytes, now)
        self._sessions[peer] = session
        self._of_name.setdefault(name, OrderedDict())[peer] = None
        return session

    def _make_room(self, among: OrderedDict[bytes, Session] | OrderedDict[bytes, None]) -> None:
        for _ in range(len(self._vouched) + 1):
            peer = next(iter(among), None)
            if peer is None or peer not in self._vouched:
                if peer is not None:
                    self.forget(peer)
                return
            among.move_to_end(peer)  # moved to the end, so that it is not considered again soon
