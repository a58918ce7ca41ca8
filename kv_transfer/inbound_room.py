"""One request on the receiving side: a part for each prefill rank that sends to this decode rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import InternalError, Overloaded
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.cuts import sources
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.inbound import Inbound, Link, LinkState
from kv_transfer.page_check import PageCheck
from kv_transfer.record_times import RecordTimes
from kv_transfer.state import ReceiveState


@dataclass(slots=True, eq=False)
class InboundRoom:
    """The parts arrive together, fail together, and return their pages together."""

    room: int
    pages: tuple[int, ...]
    state_slot: int
    held_pages: int  # logical pages that the node has already
    deadline: float | None
    parts: list[Inbound] = field(default_factory=list)
    given_up: bool = False  # it failed, or the node aborted it

    @property
    def arrived(self) -> bool:
        """True once every part has been verified."""
        return all(part.state is ReceiveState.ARRIVED for part in self.parts)

    @property
    def freed(self) -> bool:
        """True once no write can reach its pages."""
        return all(part.state is ReceiveState.FREED for part in self.parts)

    @property
    def quarantined(self) -> bool:
        return any(part.state is ReceiveState.QUARANTINED for part in self.parts)

    @property
    def record(self) -> HandoffRecord:
        """The record that the first prefill rank sent; only for a room that has arrived."""
        first = min(self.parts, key=lambda part: part.link.ranks)
        assert first.record is not None
        return first.record

    @property
    def times(self) -> RecordTimes:
        """The times of the record that was seen last."""
        return max((part.times for part in self.parts), key=lambda times: times.seen)

    @property
    def checks(self) -> tuple[PageCheck, ...]:
        """The comparisons of all parts that had not ended when the record arrived."""
        return tuple(part.check for part in self.parts if part.check is not None)

    def part_of(self, link: Link) -> Inbound | None:
        return next((part for part in self.parts if part.link is link), None)

    def missing(self, layout: PoolLayout) -> str | None:
        """Return why its prefill ranks are not those that this rank needs; None if they are or one is not known yet."""
        if any(part.link.state is not LinkState.READY for part in self.parts):
            return None
        given = {part.link.ranks for part in self.parts}
        size = self.parts[0].link.ranks[1]
        needed = {(rank, size) for rank in sources(layout.spec, size, layout.tp_rank, layout.tp_size)}
        if given == needed:
            return None
        return (
            f"decode rank {layout.tp_rank} of {layout.tp_size} needs pages of prefill ranks {_shown(needed)}, "
            f"the request names {_shown(given)}"
        )


def _shown(ranks: set[tuple[int, int]]) -> str:
    return ", ".join(f"{rank} of {size}" for rank, size in sorted(ranks))


class InboundRooms:
    """The rooms of one receiver and their resources: record slots, pages, state slots."""

    def __init__(self, layout: PoolLayout, record_slots: int) -> None:
        self._layout = layout
        self._record_slots = record_slots
        self.free_record_slots = list(range(record_slots))
        self._rooms: dict[int, InboundRoom] = {}
        self._pages: set[int] = set()  # pages of rooms that have neither arrived nor been freed
        self._state_slots: set[int] = set()  # state slots of the same rooms
        self._generation = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def __iter__(self) -> Iterator[InboundRoom]:
        return iter(list(self._rooms.values()))

    @property
    def holds_nothing(self) -> bool:
        """True if no record slot, page or state slot is in use."""
        return len(self.free_record_slots) == self._record_slots and not self._pages and not self._state_slots

    def get(self, room: int) -> InboundRoom | None:
        return self._rooms.get(room)

    def of(self, part: Inbound) -> InboundRoom:
        return self._rooms[part.room]

    def parts(self, link: Link | None = None) -> list[Inbound]:
        """Return the parts of all rooms, or only those that one prefill rank sends."""
        return [part for room in self for part in room.parts if link is None or part.link is link]

    def open(
        self,
        room: int,
        links: Sequence[Link],
        pages: Sequence[int],
        held_pages: int,
        deadline: float | None,
        state_slot: int,
        now: float,
    ) -> InboundRoom:
        """Open a room with a part for each link. Raises Overloaded without record slots, InternalError for misuse."""
        self._check_record_slots(len(links))
        self._check_memory(room, pages, state_slot)
        whole = self._rooms[room] = InboundRoom(room, tuple(pages), state_slot, held_pages, deadline)
        self._pages.update(pages)
        self._state_slots.update({state_slot} - {0})
        self.complete(whole, links, now)
        return whole

    def complete(self, whole: InboundRoom, links: Sequence[Link], now: float) -> None:
        """Add a part for each link that has none. Raises Overloaded without record slots."""
        missing = [link for link in links if whole.part_of(link) is None]
        self._check_record_slots(len(missing))
        for link in missing:
            self._generation += 1
            slot, held_pages = self.free_record_slots.pop(), whole.held_pages
            part = Inbound(whole.room, self._generation, link, whole.pages, held_pages, slot, whole.deadline)
            part.state_slot, part.next_page = whole.state_slot, held_pages
            part.moved_at = now
            whole.parts.append(part)

    def release_memory(self, whole: InboundRoom) -> None:
        """Return pages and state slot of the room to the node."""
        self._pages.difference_update(whole.pages)
        self._state_slots.discard(whole.state_slot)

    def remove(self, whole: InboundRoom) -> None:
        """Remove the room; its record slots are free for other rooms."""
        del self._rooms[whole.room]
        self.free_record_slots.extend(part.record_slot for part in whole.parts)

    def _check_record_slots(self, needed: int) -> None:
        if len(self.free_record_slots) < needed:
            raise Overloaded(f"all {self._record_slots} record slots are in use")

    def _check_memory(self, room: int, pages: Sequence[int], state_slot: int) -> None:
        if len(set(pages)) != len(pages) or not self._pages.isdisjoint(pages):
            raise InternalError(f"room {room}: a page is listed twice or belongs to another room")
        if pages and not 0 <= min(pages) <= max(pages) < self._layout.num_pages:
            raise InternalError(f"room {room}: a page is outside of the pool of {self._layout.num_pages}")
        slots = self._layout.num_slots
        if state_slot in self._state_slots or not (0 < state_slot < slots or state_slot == slots == 0):
            raise InternalError(
                f"room {room}: state slot {state_slot} of {slots} is in use, or does not exist"
            )
