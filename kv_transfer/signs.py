"""Signs of life between the two ends of transfers. They bound every wait: a room that nobody names is lost in seconds.

A prefill node names the rooms that have slots and are worked on or wait for their turn (Working), a decode node those
that wait for pages (Queued). Either announces work that may keep its loop busy for long before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from kv_transfer.handshake import Peer
from kv_transfer.inbound import Link, LinkState
from kv_transfer.inbound_room import InboundRooms
from kv_transfer.messages import MAX_BUSY_MS, MAX_ROOMS, Queued, Working
from kv_transfer.outbound import Outbound
from kv_transfer.outbound_room import OutboundRoom

SIGN_SECONDS = 0.5  # between two signs of one end
LONG_SECONDS = 2.0  # of announced work: then the peers are told before it begins


class _Signs:
    """When signs of one end are due, and how long that end may be silent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_at = clock()
        self._busy_until = clock()

    @property
    def _busy_ms(self) -> int:
        return min(max(0, int((self._busy_until - self._clock()) * 1000)), MAX_BUSY_MS)

    def _due(self) -> bool:
        now = self._clock()
        if now < self._due_at:
            return False
        self._due_at = now + SIGN_SECONDS
        return True

    def _must_tell(self, seconds: float) -> bool:
        """The loop is about to be busy for so long: whether peers should hear of it first."""
        before, self._busy_until = self._busy_until, max(self._busy_until, self._clock() + seconds)
        return seconds >= LONG_SECONDS and self._busy_until - before >= LONG_SECONDS


class SenderSigns(_Signs):
    """The signs that a prefill node gives and hears."""

    def __init__(
        self,
        rooms: Mapping[int, OutboundRoom],
        peers: Callable[[], Iterable[Peer]],
        say: Callable[[bytes, Working], None],
        clock: Callable[[], float],
    ) -> None:
        """`rooms` and `peers`: those of the sender, looked at anew each time."""
        super().__init__(clock)
        self._rooms = rooms
        self._peers = peers
        self._say = say

    def announce(self, seconds: float) -> None:
        """The node's loop may be busy for so long from now on: decode nodes must not take it for a loss."""
        if self._must_tell(seconds):
            # Every peer has to know: rooms that are new, or whose slots come meanwhile, wait for this work, too.
            for peer in self._peers():
                self._say(peer.identity, Working((), self._busy_ms))

    def tell(self) -> None:
        """Call in every poll."""
        if self._rooms and self._due():
            self._tell()

    def heard(self, peer: Peer | None, queued: Queued) -> None:
        """A decode node named rooms that wait for pages, or is about to be busy."""
        if peer is None:
            return
        peer.busy_until = self._clock() + queued.busy_ms / 1000
        named = set(queued.rooms)
        for outbound in self._parts():
            if outbound.decode == peer.incarnation and (outbound.room in named or queued.busy_ms):
                outbound.expected_at = max(outbound.expected_at, peer.busy_until)

    def _parts(self) -> Iterator[Outbound]:
        return (part for room in self._rooms.values() for part in room.parts)

    def _tell(self) -> None:
        """Name rooms that have been here for a while, but none that ended with writes on the way: its decode node is
        to give it up."""
        rooms: dict[Peer, list[int]] = {}
        before = self._clock() - SIGN_SECONDS
        for outbound in self._parts():
            in_hand = outbound.failure is None and outbound.expected_at <= before
            if in_hand and outbound.peer is not None and not outbound.peer.lost:
                rooms.setdefault(outbound.peer, []).append(outbound.room)
        for peer, named in rooms.items():
            self._say(peer.identity, Working(tuple(named[:MAX_ROOMS]), self._busy_ms))


class ReceiverSigns(_Signs):
    """The signs that a decode node gives and hears."""

    def __init__(
        self,
        links: Mapping[str, Link],
        rooms: InboundRooms,
        say: Callable[[Link, Queued], None],
        clock: Callable[[], float],
    ) -> None:
        """`links` and `rooms`: those of the receiver, looked at anew each time."""
        super().__init__(clock)
        self._links = links
        self._rooms = rooms
        self._say = say

    def announce(self, seconds: float) -> None:
        """The node's loop may be busy for so long from now on: prefill nodes must not take it for a loss."""
        if self._must_tell(seconds):
            for link in self._links.values():
                if link.state is LinkState.READY:
                    self._say(link, Queued((), self._busy_ms))

    def tell(self, waiting: Iterable[tuple[str, int]]) -> None:
        """Call in every turn with (prefill incarnation, room) of all requests that wait for pages."""
        if not self._due():
            return
        rooms: dict[str, list[int]] = {}
        for incarnation, room in waiting:
            rooms.setdefault(incarnation, []).append(room)
        for incarnation, named in rooms.items():
            link = self._links.get(incarnation)
            if link is not None and link.state is not LinkState.LOST:
                self._say(link, Queued(tuple(named[:MAX_ROOMS]), self._busy_ms))

    def heard(self, link: Link, working: Working) -> None:
        """A prefill node named rooms that it works on, or is about to be busy."""
        link.busy_until = self._clock() + working.busy_ms / 1000
        named = set(working.rooms)
        for inbound in self._rooms.parts(link):
            if inbound.active and (inbound.room in named or working.busy_ms):
                inbound.moved_at = max(inbound.moved_at, link.busy_until)
