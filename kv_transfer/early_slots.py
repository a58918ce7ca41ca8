"""Slots that arrive before their prompt: bounded in number, per peer and in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.expiring import ExpiringMap
from kv_transfer.handshake import Peer
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import Slots

NO_PROMPT = "no prompt arrived for this room in time"


@dataclass(frozen=True, slots=True)
class EarlyEntry:
    peer: Peer
    slots: Slots
    received_at: float


class EarlySlots:
    """Maps (room, decode incarnation) to its entry. A peer that floods can only fill its own share."""

    def __init__(self, limits: TransferLimits, clock: Callable[[], float]) -> None:
        self._entries: ExpiringMap[tuple[int, str], EarlyEntry] = ExpiringMap(
            limits.early_slots, limits.early_ttl, clock
        )
        self._decodes: dict[int, set[str]] = {}  # room -> incarnations that have an entry
        self._per_peer = limits.early_slots_per_peer
        self._clock = clock

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, room: int, decode: str) -> EarlyEntry | None:
        return self._entries.get((room, decode))

    def take_all(self, room: int) -> list[EarlyEntry]:
        """Remove and return the entries of a room from all decode nodes."""
        decodes = self._decodes.get(room)
        if decodes is None:
            return []
        taken = [self.take(room, decode) for decode in list(decodes)]
        return [early for early in taken if early is not None]

    def take(self, room: int, decode: str) -> EarlyEntry | None:
        early = self._entries.pop((room, decode))
        if early is not None:
            self._left([early])
        return early

    def full(self, peer: Peer, slots: Slots) -> bool:
        """Return True if the peer has used up its share, or would grant more pages than its pool has."""
        pages = peer.early_pages + len(slots.pages)
        return peer.early >= self._per_peer or pages > peer.hello.layout.num_pages

    def put(self, peer: Peer, slots: Slots) -> list[EarlyEntry]:
        """Add an entry and return the oldest entries if they had to make room for it."""
        peer.early += 1
        peer.early_pages += len(slots.pages)
        self._decodes.setdefault(slots.room, set()).add(peer.incarnation)
        return self._left(
            self._entries.put((slots.room, peer.incarnation), EarlyEntry(peer, slots, self._clock()))
        )

    def expire(self) -> list[EarlyEntry]:
        """Remove and return the entries whose prompt did not arrive in time."""
        return self._left(self._entries.expire())

    def forget(self, peer: Peer) -> None:
        self._left(self._entries.remove_where(lambda early: early.peer is peer))

    def _left(self, entries: list[EarlyEntry]) -> list[EarlyEntry]:
        for early in entries:
            early.peer.early -= 1
            early.peer.early_pages -= len(early.slots.pages)
            decodes = self._decodes[early.slots.room]
            decodes.discard(early.peer.incarnation)
            if not decodes:
                del self._decodes[early.slots.room]
        return entries
