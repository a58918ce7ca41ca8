"""Signs of life between the two ends. They bound every wait: a room that nobody names is lost within seconds.

A prefill node names the rooms that have slots and are processed or queued (Working); a decode node names the rooms
that wait for pages (Queued). Both announce long work on their loop before they begin it.
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
LONG_SECONDS = 2.0  # shortest work that is announced to the peers before it begins


class _Signs:
    """Tracks when signs of one end are due, and for how long that end may be silent."""

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
        """Note that the loop will be busy for `seconds`; return whether peers must be notified first."""
        before, self._busy_until = self._busy_until, max(self._busy_until, self._clock() + seconds)
        return seconds >= LONG_SECONDS and self._busy_until - before >= LONG_SECONDS


class SenderSigns(_Signs):
    """The signs of life that a prefill node sends and receives."""

    def __init__(
        self,
        rooms: Mapping[int, OutboundRoom],
        peers: Callable[[], Iterable[Peer]],
        say: Callable[[bytes, Working], None],
        clock: Callable[[], float],
    ) -> None:
        """`rooms` and `peers` are live views of the sender's."""
        super().__init__(clock)
        self._rooms = rooms
        self._peers = peers
        self._say = say

    def announce(self, seconds: float) -> None:
        """Tell every decode node that this node's loop may be busy for `seconds` from now on."""
        if self._must_tell(seconds):
            # Every peer is notified: rooms that are new, or whose slots arrive meanwhile, wait for this work too.
            for peer in self._peers():
                self._say(peer.identity, Working((), self._busy_ms))

    def tell(self) -> None:
        """Send the signs of life that are due. Called in every poll."""
        if self._rooms and self._due():
            self._tell()

    def heard(self, peer: Peer | None, queued: Queued) -> None:
        """Process the message of a decode node that names rooms that wait for pages, or says that it will be busy."""
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
        """Name rooms that have been here for SIGN_SECONDS.

        Rooms that ended with outstanding writes are left out, so that their decode node gives them up.
        """
        rooms: dict[Peer, list[int]] = {}
        before = self._clock() - SIGN_SECONDS
        for outbound in self._parts():
            in_hand = outbound.failure is None and outbound.expected_at <= before
            if in_hand and outbound.peer is not None and not outbound.peer.lost:
                rooms.setdefault(outbound.peer, []).append(outbound.room)
        for peer, named in rooms.items():
            self._say(peer.identity, Working(tuple(named[:MAX_ROOMS]), self._busy_ms))


class ReceiverSigns(_Signs):
    """The signs of life that a decode node sends and receives."""

    def __init__(
        self,
        links: Mapping[str, Link],
        rooms: InboundRooms,
        say: Callable[[Link, Queued], None],
        clock: Callable[[], float],
    ) -> None:
        """`links` and `rooms` are live views of the receiver's."""
        super().__init__(clock)
        self._links = links
        self._rooms = rooms
        self._say = say

    def announce(self, seconds: float) -> None:
        """Tell every prefill node that this node's loop may be busy for `seconds` from now on."""
        if self._must_tell(seconds):
            for link in self._links.values():
                if link.state is LinkState.READY:
                    self._say(link, Queued((), self._busy_ms))

    def tell(self, waiting: Iterable[tuple[str, int]]) -> None:
        """Send the signs that are due.

        Called in every turn with (prefill incarnation, room) of all waiting requests.
        """
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
        """Process the message of a prefill node that names rooms it works on, or says that it will be busy."""
        link.busy_until = self._clock() + working.busy_ms / 1000
        named = set(working.rooms)
        for inbound in self._rooms.parts(link):
            if inbound.active and (inbound.room in named or working.busy_ms):
                inbound.moved_at = max(inbound.moved_at, link.busy_until)
