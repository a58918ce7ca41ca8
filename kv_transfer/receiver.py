"""The decode node's end of every transfer: many prefill nodes, one Receiver.

Pages of a room that ends early are given back (`PagesFree`) only when no write can hit them any more: the
transport fences them, or the sender says so, or its process is proved dead. Until then they are in
quarantine; no timeout ends a quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.errors import (
    ChecksumFailed,
    HandshakeRefused,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    ProtocolError,
    RecordError,
    TransferFailed,
    Unavailable,
)
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer import messages
from kv_transfer.counters import ReceiverCounters
from kv_transfer.events import Arrived, Failed, PagesFree, PeerRefused, ReceiverEvent
from kv_transfer.inbound import Inbound, Link, LinkState
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import (
    Abort,
    AbortAck,
    Hello,
    PagesWritten,
    RecordWritten,
    Refused,
    SenderFailed,
    SenderInbox,
    Welcome,
    Working,
)
from kv_transfer.signs import ReceiverSigns
from kv_transfer.state import ReceiveState
from kv_transfer.transport.base import ReceiverEndpoint, Region
from kv_transfer.transport.description import to_wire

__all__ = ["Arrived", "Failed", "PagesFree", "PeerRefused", "Receiver", "ReceiverEvent"]


class Receiver:
    """Poll-driven; one thread.

    `endpoint` has allocated its kv region; the records are allocated here. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        incarnation: str,
        node: str,
        endpoint: ReceiverEndpoint,
        layout: PoolLayout,
        clock: Callable[[], float],
        limits: TransferLimits,
        record_slots: int,
    ) -> None:
        endpoint.allocate(Region.RECORDS, record_slots * limits.record_bytes)
        endpoint.open(layout, limits.record_bytes)
        self.counters = ReceiverCounters()
        self._incarnation = incarnation
        self._node = node
        self._endpoint = endpoint
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self._record_slots = record_slots
        self._free_slots = list(range(record_slots))
        self._links: dict[str, Link] = {}
        self._rooms: dict[int, Inbound] = {}
        self._held: set[int] = set()  # pages of rooms that have neither arrived nor been freed
        self._generation = 0
        self.signs = ReceiverSigns(self._links, self._rooms, self._say, clock)
        self._events: list[ReceiverEvent] = []

    @property
    def active(self) -> int:
        """Rooms that hold a record slot: waiting, arrived and not closed, or quarantined."""
        return len(self._rooms)

    @property
    def quarantined_pages(self) -> int:
        return sum(len(room.pages) for room in self._rooms.values() if room.state is ReceiveState.QUARANTINED)

    # ---- what the decode node wants

    def connect(self, peer_incarnation: str, send: Callable[[bytes], object]) -> None:
        """Say Hello to this incarnation of a prefill node; again over a new socket, or after it was lost.

        `send(frame)` must not block; False means that the frame was not taken. Raises Overloaded when
        max_peers prefill nodes are in use.
        """
        if len(self._links) >= self._limits.max_peers and peer_incarnation not in self._links:
            raise Overloaded(
                f"this decode node takes from {len(self._links)} prefill nodes already (max_peers)"
            )
        link = self._links.get(peer_incarnation)
        if link is None:
            link = self._links[peer_incarnation] = Link(peer_incarnation, send, self._clock())
        link.send, link.greeted_at, link.state = send, self._clock(), LinkState.GREETING
        described = to_wire(self._endpoint.describe(peer_incarnation))
        records = self._record_slots, self._limits.record_bytes
        self._say(link, Hello(self._node, self._layout, described, *records))

    def open(
        self,
        room: int,
        peer_incarnation: str,
        pages: Sequence[int],
        held_pages: int,
        deadline: float | None = None,
    ) -> int:
        """Let the peer write logical pages held_pages.. of this room into `pages`; returns the generation.

        The pages are the receiver's until Arrived or PagesFree. Raises InvalidRequest (room is active),
        Overloaded (no record slot), Unavailable (the peer is not connected).
        """
        if room in self._rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        link = self._links.get(peer_incarnation)
        if link is None or link.state is LinkState.LOST:
            raise Unavailable(f"prefill node {peer_incarnation} is not connected")
        if not self._free_slots:
            raise Overloaded(f"all {self._record_slots} record slots are in use")
        if len(set(pages)) != len(pages) or not self._held.isdisjoint(pages):
            raise InternalError(f"room {room}: a page is given twice, or is in the hands of another room")
        if pages and not 0 <= min(pages) <= max(pages) < self._layout.num_pages:
            raise InternalError(f"room {room}: a page is outside of the pool of {self._layout.num_pages}")
        self._generation += 1
        inbound = Inbound(
            room, self._generation, link, tuple(pages), held_pages, self._free_slots.pop(), deadline
        )
        inbound.next_page, inbound.moved_at = held_pages, max(self._clock(), link.busy_until)
        self._rooms[room] = inbound
        self._held.update(pages)
        if link.state is LinkState.READY:
            self._send_slots(inbound)
        return inbound.generation

    def abort(self, room: int, reason: str, code: str = TransferFailed.code) -> None:
        """The node gives the room up: exactly one PagesFree follows, once nothing can be written any more.

        Also takes back a room that has arrived and is not closed. Unknown rooms are ignored, and so are
        rooms that failed before: their PagesFree comes anyway.
        """
        inbound = self._rooms.get(room)
        if inbound is None or inbound.state is ReceiveState.QUARANTINED:
            return
        self.counters.aborted += 1
        if inbound.state is ReceiveState.ARRIVED:
            self._events = [e for e in self._events if not (isinstance(e, Arrived) and e.room == room)]
            self._free(inbound)
        else:
            self._let_go(inbound, code, reason)

    def close(self, room: int) -> None:
        """Arrived was consumed: the record slot is free for another room. Unknown rooms are ignored."""
        inbound = self._rooms.get(room)
        if inbound is None:
            return
        if inbound.state is not ReceiveState.ARRIVED:
            raise InternalError(f"room {room} closed while {inbound.state.value}; abort it instead")
        inbound.go(ReceiveState.CLOSED)
        self._remove(inbound)

    def peer_lost(self, incarnation: str) -> None:
        """This prefill node counts as dead; its pages wait until that is proved or it answers."""
        link = self._links.get(incarnation)
        if link is not None:
            self._lose(link, NodeLost.code, f"prefill node {link.node or incarnation} is gone")

    def link_lost(self, incarnation: str) -> None:
        """The way to this prefill node is broken, and the node may well live: its rooms may be placed elsewhere."""
        link = self._links.get(incarnation)
        if link is not None:
            reason = f"the link to prefill node {link.node or incarnation} is broken"
            self._lose(link, TransferFailed.code, reason)

    def link_works(self, incarnation: str) -> None:
        """Its process is connected. If it does not answer Hello its loop is busy; whether it hangs the router sees."""
        link = self._links.get(incarnation)
        if link is not None and link.state is LinkState.GREETING:
            link.greeted_at = self._clock()

    def shutdown(self) -> None:
        """The node ends: withdraw the memory."""
        self._endpoint.close()

    def poll(self) -> list[ReceiverEvent]:
        """Look at every deadline and every quarantine; what happened since the last call."""
        now = self._clock()
        waiting = {room.link.incarnation for room in self._rooms.values()}
        for link in list(self._links.values()):
            timeout = self._limits.handshake_timeout
            if link.state is LinkState.GREETING and now - link.greeted_at >= timeout:
                self.counters.timeouts["handshake"] += 1
                self._refused(link, f"the prefill node did not answer Hello within {timeout:g} s")
            elif link.state is LinkState.READY and self._endpoint.proves_dead(link.incarnation):
                self._lose(link, NodeLost.code, f"the process of prefill node {link.node} ended")
            elif link.state is LinkState.LOST and link.incarnation not in waiting:
                del self._links[link.incarnation]
                self._endpoint.forget(link.incarnation)
        for inbound in list(self._rooms.values()):
            self._watch(inbound, now)
        events, self._events = self._events, []
        return events

    # ---- what prefill nodes say

    def handle(self, peer_incarnation: str, message: bytes) -> None:
        """`message` is a frame from the socket to that incarnation. Whatever it says, nothing is raised."""
        link = self._links.get(peer_incarnation)
        if link is None:
            self.counters.stale_incarnation += 1
            return
        try:
            incarnation, decoded = messages.decode_for_receiver(message)
        except HandshakeRefused as error:
            self._refused(link, str(error))
            return
        except ProtocolError:
            self.counters.malformed += 1
            return
        if incarnation != link.incarnation:
            self.counters.stale_incarnation += 1
            if link.state is LinkState.GREETING:
                self._refused(link, f"another incarnation answers at its address: {incarnation}")
        elif isinstance(decoded, Welcome):
            self._welcome(link, decoded)
        elif isinstance(decoded, Refused):
            self._refused(link, decoded.reason)
        elif isinstance(decoded, Working):
            self.signs.heard(link, decoded)
        else:
            self._told(link, decoded)

    def _welcome(self, link: Link, welcome: Welcome) -> None:
        if link.state is not LinkState.GREETING:
            self.counters.duplicates += 1
            return
        try:
            self._endpoint.admit(link.incarnation, welcome.process)
        except HandshakeRefused as error:
            self._refused(link, str(error))
            return
        link.state, link.node = LinkState.READY, welcome.node
        for inbound in self._of(link):
            if inbound.state is ReceiveState.QUEUED:
                self._send_slots(inbound)

    def _told(self, link: Link, told: PagesWritten | RecordWritten | SenderFailed | AbortAck) -> None:
        inbound = self._rooms.get(told.room)
        if inbound is None or inbound.link is not link:
            if not isinstance(told, AbortAck):  # an abort of fenced pages is not waited for
                self.counters.unknown_room += 1
        elif told.generation != inbound.generation:
            self.counters.stale_generation += 1
        elif inbound.state is ReceiveState.QUARANTINED:
            if not isinstance(told, PagesWritten):  # all others say that no write is outstanding
                self._free(inbound)
        elif inbound.state is ReceiveState.ARRIVED:
            self.counters.duplicates += 1
        elif inbound.state is ReceiveState.QUEUED:
            self.counters.unknown_room += 1  # nobody was told of this generation
        elif isinstance(told, PagesWritten):
            self._progress(inbound, told)
        elif isinstance(told, RecordWritten):
            self._verify(inbound, told)
        elif isinstance(told, SenderFailed):
            self._fail(inbound, told.code, told.reason)
            self._free(inbound)
        else:
            self.counters.duplicates += 1

    def _progress(self, inbound: Inbound, told: PagesWritten) -> None:
        end = told.first + told.count
        if end <= inbound.next_page or end > inbound.held_pages + len(inbound.pages):
            self.counters.duplicates += 1
            return
        if told.first > inbound.next_page:
            self.counters.gaps += 1  # a frame was lost; the checksums decide in the end
        inbound.next_page, inbound.moved_at = end, self._clock()
        inbound.go(ReceiveState.RECEIVING)

    def _verify(self, inbound: Inbound, told: RecordWritten) -> None:
        # the sender is done: whatever comes now is not of this transfer
        self._endpoint.revoke(inbound.generation)
        try:
            record = inbound.verified_record(self._endpoint, told.length, self._limits.verify_checksums)
        except RecordError as error:
            code = TransferFailed.code
            if error.cause == "checksum":
                code = ChecksumFailed.code
                self.counters.checksum_failures += 1
            else:
                self.counters.record_failures[error.cause] += 1
            self._fail(inbound, code, str(error))
            self._free(inbound)
            return
        inbound.go(ReceiveState.ARRIVED)
        self._held.difference_update(inbound.pages)
        self.counters.arrived += 1
        self.counters.pages_received += len(inbound.pages)
        self._events.append(Arrived(inbound.room, record))

    # ---- ends

    def _watch(self, inbound: Inbound, now: float) -> None:
        if inbound.active:
            overdue = inbound.overdue(now, self._limits)
            if overdue is not None:
                cause, code, reason = overdue
                self.counters.timeouts[cause] += 1
                self._fail(inbound, code, reason)
                self._let_go(inbound, code, reason)
        elif inbound.state is ReceiveState.QUARANTINED:
            if self._endpoint.proves_dead(inbound.link.incarnation):
                self._free(inbound)
            elif now - inbound.moved_at >= self._limits.abort_retry:
                self.counters.abort_retries += 1
                self._say_abort(inbound)

    def _fail(self, inbound: Inbound, code: str, reason: str) -> None:
        self.counters.failed += 1
        self._events.append(Failed(inbound.room, code, reason))

    def _let_go(self, inbound: Inbound, code: str, reason: str) -> None:
        """Give the room up while its sender may be writing: free the pages if that is safe, else wait."""
        if inbound.state is ReceiveState.QUEUED:
            self._free(inbound)
            return
        inbound.aborted_for = (code, reason)
        fenced = self._endpoint.revoke(inbound.generation)
        if not self._endpoint.proves_dead(inbound.link.incarnation):
            self._say_abort(inbound)
            if not fenced:
                inbound.go(ReceiveState.QUARANTINED)
                self.counters.quarantined += 1
                return
        self._free(inbound)

    def _free(self, inbound: Inbound) -> None:
        if inbound.state is not ReceiveState.QUEUED:
            self._endpoint.revoke(inbound.generation)
        inbound.go(ReceiveState.FREED)
        self._remove(inbound)
        self._held.difference_update(inbound.pages)
        self._events.append(PagesFree(inbound.room, inbound.pages))

    def _remove(self, inbound: Inbound) -> None:
        del self._rooms[inbound.room]
        self._free_slots.append(inbound.record_slot)

    def _refused(self, link: Link, reason: str) -> None:
        if link.state is LinkState.LOST:
            return
        self.counters.refused += 1
        self._events.append(PeerRefused(link.incarnation, reason))
        self._lose(link, TransferFailed.code, reason)

    def _lose(self, link: Link, code: str, reason: str) -> None:
        """Fail its rooms; those that it may be writing to go into quarantine."""
        if link.state is LinkState.LOST:
            return
        link.state = LinkState.LOST
        self._endpoint.expel(link.incarnation)
        for inbound in self._of(link):
            if inbound.active:
                self._fail(inbound, code, reason)
                self._let_go(inbound, code, reason)

    # ---- the way out

    def _send_slots(self, inbound: Inbound) -> None:
        inbound.go(ReceiveState.AWAITING)
        inbound.moved_at = max(self._clock(), inbound.link.busy_until)
        self._endpoint.announce(inbound.window)
        self._say(inbound.link, inbound.slots(self._clock()))

    def _say_abort(self, inbound: Inbound) -> None:
        inbound.moved_at = self._clock()
        code, reason = inbound.aborted_for
        self._say(inbound.link, Abort(inbound.room, inbound.generation, code[:64], reason[:4096]))

    def _say(self, link: Link, message: SenderInbox) -> None:
        if link.send(messages.encode(message, self._incarnation)) is False:
            self.counters.unsent += 1

    def _of(self, link: Link) -> Iterable[Inbound]:
        return [room for room in self._rooms.values() if room.link is link]
