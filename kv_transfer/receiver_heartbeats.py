"""The heartbeats that a decode node sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kv_transfer.heartbeats import Heartbeats
from kv_transfer.inbound import Link, LinkState
from kv_transfer.inbound_room import InboundRooms
from kv_transfer.messages import MAX_ROOMS, Queued, Working


class ReceiverHeartbeats(Heartbeats):
    """The heartbeats that a decode node sends and receives."""

    def __init__(
        self,
        links: Mapping[str, Link],
        rooms: InboundRooms,
        send: Callable[[Link, Queued], None],
        clock: Callable[[], float],
    ) -> None:
        """`links` and `rooms` are live views of the receiver's."""
        super().__init__(clock)
        self._links = links
        self._rooms = rooms
        self._send = send

    def announce(self, seconds: float) -> None:
        """Tell every prefill node that this node's loop may be busy for `seconds` from now on."""
        if self.must_announce(seconds):
            for link in self._links.values():
                if link.state is LinkState.READY:
                    self._send(link, Queued((), self.busy_ms))

    def send_due(self, waiting: Iterable[tuple[str, int]]) -> None:
        """Send the heartbeats that are due.

        Called in every turn with (prefill incarnation, room) of all waiting requests.
        """
        if not self.due():
            return
        rooms: dict[str, list[int]] = {}
        for incarnation, room in waiting:
            rooms.setdefault(incarnation, []).append(room)
        for incarnation, named in rooms.items():
            link = self._links.get(incarnation)
            if link is not None and link.state is not LinkState.LOST:
                self._send(link, Queued(tuple(named[:MAX_ROOMS]), self.busy_ms))

    def handle(self, link: Link, working: Working) -> None:
        """Process the message of a prefill node that names rooms it works on, or says that it will be busy."""
        now = self.clock()
        link.busy_until = now + working.busy_ms / 1000
        named = set(working.rooms)
        for inbound in self._rooms.parts(link):
            if inbound.active and inbound.room in named:
                inbound.moved_at = now
