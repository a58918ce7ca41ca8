"""The heartbeats that a prefill node sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from kv_transfer.handshake import Peer
from kv_transfer.heartbeats import HEARTBEAT_SECONDS, Heartbeats
from kv_transfer.messages import MAX_ROOMS, Queued, Working
from kv_transfer.outbound import Outbound
from kv_transfer.outbound_room import OutboundRoom


class SenderHeartbeats(Heartbeats):
    """The heartbeats that a prefill node sends and receives."""

    def __init__(
        self,
        rooms: Mapping[int, OutboundRoom],
        peers: Callable[[], Iterable[Peer]],
        send: Callable[[bytes, Working], None],
        clock: Callable[[], float],
    ) -> None:
        """`rooms` and `peers` are live views of the sender's."""
        super().__init__(clock)
        self._rooms = rooms
        self._peers = peers
        self._send = send

    def announce(self, seconds: float) -> None:
        """Tell every decode node that this node's loop may be busy for `seconds` from now on."""
        if self.must_announce(seconds):
            # Every peer is notified: rooms that are new, or whose slots arrive meanwhile, wait for this work too.
            for peer in self._peers():
                self._send(peer.identity, Working((), self.busy_ms))

    def send_due(self) -> None:
        """Send the heartbeats that are due. Called in every poll.

        They name rooms that have been here for HEARTBEAT_SECONDS. Rooms that ended with outstanding writes are left
        out, so that their decode node gives them up.
        """
        if not self._rooms or not self.due():
            return
        rooms: dict[Peer, list[int]] = {}
        before = self.clock() - HEARTBEAT_SECONDS
        for outbound in self._parts():
            in_hand = outbound.failure is None and outbound.expected_at <= before
            if in_hand and outbound.peer is not None and not outbound.peer.lost:
                rooms.setdefault(outbound.peer, []).append(outbound.room)
        for peer, named in rooms.items():
            self._send(peer.identity, Working(tuple(named[:MAX_ROOMS]), self.busy_ms))

    def handle(self, peer: Peer | None, queued: Queued) -> list[OutboundRoom]:
        """Process the message of a decode node that names rooms that wait for pages, or says that it will be busy.

        Returns the rooms that may now be given up sooner than before: the node has announced work that ended early.
        """
        if peer is None:
            return []
        now, before = self.clock(), peer.busy_until
        # A message that announces nothing ends what was announced before.
        peer.busy_until = now + queued.busy_ms / 1000 if queued.busy_ms else min(before, now)
        named = set(queued.rooms)
        theirs = [part for part in self._parts() if part.decode == peer.incarnation]
        for outbound in theirs:
            outbound.busy_until = peer.busy_until
            if outbound.room in named:
                outbound.named_at = now
        return [self._rooms[each.room] for each in theirs] if peer.busy_until < before else []

    def _parts(self) -> Iterator[Outbound]:
        return (part for room in self._rooms.values() for part in room.parts)
