"""The router's control socket without a network: a test decides when each message arrives, and who can be reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.fakes.stepped_loop import SteppedLoop

FRAMES, ENDS = 1, 2  # descriptors


class _NoBadFrames:
    total = 0


class _Ends:
    """Says that connections have ended."""

    def __init__(self) -> None:
        self.ended = False

    def fileno(self) -> int:
        return ENDS

    def take(self) -> bool:
        ended, self.ended = self.ended, False
        return ended


class MemoryRouterSocket:
    """Stands for common.ipc.RouterSocket, in the same process as its peers.

    Attributes:
        peers: routing id of a peer with a session -> takes a message, and returns whether it can be reached.
        links: routing id -> takes what is sent without a guarantee of delivery.
        refused: what the router has refused, with its reason.
    """

    address = "ipc://nowhere"
    more = False

    def __init__(self, loop: SteppedLoop) -> None:
        self.peers: dict[bytes, Callable[[bytes | None], bool]] = {}
        self.links: dict[bytes, Callable[[bytes], None]] = {}
        self.refused: list[tuple[bytes, str]] = []
        self.bad = _NoBadFrames()
        self.disconnects = _Ends()
        self._loop = loop
        self._arrived: deque[tuple[bytes, bytes]] = deque()

    # ---- what peers do

    def arrive(self, peer: bytes, frame: bytes) -> None:
        """Let a message of a peer be read in one of the next turns."""
        self._arrived.append((peer, frame))
        self._loop.signal(FRAMES)

    def closed(self) -> None:
        """Say that the socket of some peer has closed."""
        self.disconnects.ended = True
        self._loop.signal(ENDS)

    # ---- what the router does

    def fileno(self) -> int:
        return FRAMES

    def drain(self, most: int, signalled: bool = False) -> list[tuple[bytes, bytes]]:
        drained = [self._arrived.popleft() for _ in range(min(most, len(self._arrived)))]
        self.more = bool(self._arrived)
        return drained

    def has_work(self) -> bool:
        return bool(self._arrived)

    def send(self, peer: bytes, payload: bytes) -> bool:
        return peer in self.peers and self.peers[peer](payload)

    def send_all(self, peer: bytes, payloads: Sequence[bytes]) -> bool:
        return all(self.send(peer, payload) for payload in payloads)

    def datagram(self, peer: bytes, payload: bytes) -> bool:
        if peer in self.links:
            self.links[peer](payload)
        return peer in self.links

    def reachable(self, peer: bytes) -> bool:
        return peer in self.peers and self.peers[peer](None)

    def forget(self, peer: bytes) -> None:
        self.peers.pop(peer, None)

    def vouch_for(self, peer: bytes) -> None:
        pass

    def refuse(self, peer: bytes, reason: str) -> None:
        self.refused.append((peer, reason))

    def flush_log(self) -> None:
        pass

    def take_cut_off(self) -> Sequence[Any]:
        return ()

    def close(self) -> None:
        self.peers.clear()
