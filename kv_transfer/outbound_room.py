"""One request on the sending side: a part for each decode rank that this prefill rank sends to."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handshake import Peer
from kv_transfer.messages import Slots
from kv_transfer.outbound import Outbound


@dataclass(frozen=True, slots=True)
class GrantedSlots:
    """The grant of a decode node: logical pages held_pages .. held_pages+num_pages-1 are to be sent."""

    held_pages: int
    num_pages: int
    generation: int
    incarnation: str  # the decode node's


@dataclass(slots=True, eq=False)
class OutboundRoom:
    """The parts are granted, delivered and lost together: the room is as far as its slowest part."""

    room: int
    parts: list[Outbound]
    pages: int = 0  # that the prompt has; 0: not known

    @property
    def failure(self) -> tuple[str, str] | None:
        """Code and reason of the first part that failed; None if none has."""
        for part in self.parts:
            if part.failure is not None:
                return part.failure
        return None

    @property
    def ended(self) -> bool:
        return all(part.ended for part in self.parts)

    @property
    def busy(self) -> bool:
        """True if a part has to be polled, because neither a message nor `alarm` announces its next step."""
        return any(part.busy for part in self.parts)

    @property
    def bytes_written(self) -> int:
        """Bytes of pages, state and record that have landed."""
        return sum(part.bytes_written for part in self.parts)

    @property
    def alarm(self) -> float:
        """Time at which a part has waited for too long, if nothing happens before."""
        earliest = float("inf")
        for part in self.parts:
            earliest = min(earliest, part.alarm)
        return earliest

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    @property
    def moved_at(self) -> float:
        """Time at which bytes of any part moved last, or the oldest outstanding write of a part was posted."""
        return max(part.moved_at for part in self.parts)

    @property
    def draining(self) -> bool:
        """True if the room failed; its writes may be outstanding."""
        return self.failure is not None

    @property
    def granted(self) -> GrantedSlots | None:
        """The grant; None until every decode rank has granted, and for a room that is lost."""
        first = self.parts[0]
        for part in self.parts:
            if part.slots is None or part.failure is not None:
                return None
        assert first.slots is not None
        assert first.peer is not None
        held, count = first.slots.held_pages, len(first.slots.pages)
        return GrantedSlots(held, count, first.slots.generation, first.peer.incarnation)

    def part_of(self, peer: Peer) -> Outbound | None:
        """Return the part that this peer has granted or may grant; None if the room belongs to other decode nodes."""
        return next(
            (part for part in self.parts if part.peer is peer),
            next((part for part in self.parts if part.peer is None and part.accepts(peer)), None),
        )

    def missing(self, peer: Peer) -> list[str]:
        """Return the ranks of this peer's node that the room lacks, if it goes to that node: it goes to all of them."""
        named = {part.decode for part in self.parts}
        if self.failure is not None or named.isdisjoint(peer.destinations):
            return []
        return [decode for decode in peer.destinations if decode not in named]

    def rejects(self, slots: Slots) -> str:
        """Return why these slots are not for this room; "" if they are."""
        num_pages = slots.held_pages + len(slots.pages)
        if self.pages not in (0, num_pages):
            return f"slots refused: they are for {num_pages} pages, and the prompt has {self.pages}"
        granted = [part.slots for part in self.parts if part.slots is not None]
        wanted = slots.held_pages, len(slots.pages)
        if any((each.held_pages, len(each.pages)) != wanted for each in granted):
            return "another decode rank has granted other pages"
        return ""

    def give_up(self, code: str, reason: str) -> None:
        """Send nothing more to any of the decode ranks."""
        for part in self.parts:
            part.give_up(code, reason)
