"""The decode node's end of every transfer: many prefill nodes, one Receiver.

Pages of a room that ends early are returned (`PagesFree`) only when no write can reach them any longer: the transport
fences them, the sender confirms it, or the sender's process is known to be dead. Until then they are in quarantine;
no timeout ends a quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import (
    HandshakeRefused,
    InternalError,
    InvalidRequest,
    NodeLost,
    ProtocolError,
    RecordError,
    RequestError,
    TransferFailed,
)
from common.kv_cache.pool_layout import PoolLayout
from common.messages.identity import rank_incarnation
from kv_transfer import messages
from kv_transfer.counters import ReceiverCounters
from kv_transfer.events import Arrived, PagesFree, PeerForgot, PeerRefused, ReceiverEvent, RoomFailed
from kv_transfer.inbound import Dial, Inbound, Link, LinkState
from kv_transfer.inbound_room import InboundRoom, InboundRooms
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import AbortAck, PagesWritten, RecordWritten, SenderFailed, ToSender, Welcome
from kv_transfer.rank_links import RankLinks
from kv_transfer.receiver_heartbeats import ReceiverHeartbeats
from kv_transfer.state import ReceiveState
from kv_transfer.transport.base import ReceiverEndpoint, Region
from kv_transfer.transport.description import to_wire

__all__ = ["Arrived", "PagesFree", "PeerForgot", "PeerRefused", "Receiver", "ReceiverEvent", "RoomFailed"]


class Receiver:
    """Receives pages and records. It is poll-driven and used from one thread.

    `incarnation` is the node's: that of its rank in `layout` follows. `endpoint` has allocated its KV region.
    With `checks_later` the node takes pages that the device is still comparing, see `Arrived.checks`.
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
        checks_later: bool = False,
    ) -> None:
        endpoint.allocate(Region.RECORDS, record_slots * limits.record_bytes)
        endpoint.open(layout, limits.record_bytes)
        self.counters = ReceiverCounters()
        self._incarnation = rank_incarnation(incarnation, layout.tp_rank)
        self._leader = "" if layout.tp_rank == 0 else incarnation
        self._node = node
        self._endpoint = endpoint
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self._record_slots = record_slots
        self._later = self.counters.record_failed if checks_later else None
        self._ranks = RankLinks(layout, limits.max_peers, clock)
        self.links = self._ranks.links
        self.rooms = InboundRooms(layout, record_slots)
        self.heartbeats = ReceiverHeartbeats(self.links, self.rooms, self._notify, clock)
        self._events: list[ReceiverEvent] = []

    @property
    def active(self) -> int:
        """Number of rooms that hold record slots: waiting, arrived and not closed, or quarantined."""
        return len(self.rooms)

    @property
    def quarantined_pages(self) -> int:
        return sum(len(room.pages) for room in self.rooms if room.quarantined)

    # ---- called by the decode node

    def connect(
        self, peer_incarnation: str, send: Callable[[bytes], object], dial: Dial | None = None
    ) -> None:
        """Send Hello to this incarnation of a prefill node; again over a new socket, or after it was lost.

        `send(frame)` must not block and returns False if it did not accept the frame. `dial` connects rank 0 to the
        other ranks of that node, once their rank 0 has named them. Raises Overloaded at max_peers.
        """
        link = self._ranks.greet(peer_incarnation, send, dial)
        where, slots = to_wire(self._endpoint.describe(peer_incarnation)), self._record_slots
        hello = messages.Hello(
            self._node, self._layout, where, slots, self._limits.record_bytes, self._leader
        )
        self._notify(link, hello)

    def dial_ranks(self, incarnation: str) -> None:
        """Connect to the other ranks of the prefill node with this rank 0; raises RequestError, HandshakeRefused."""
        self._ranks.dial(incarnation, self.connect)

    def open(
        self,
        room: int,
        peers: Sequence[str],
        pages: Sequence[int],
        held_pages: int,
        deadline: float | None = None,
        state_slot: int = 0,
    ) -> int:
        """Let the peers write logical pages held_pages.. of this room into `pages`; returns the first generation.

        `peers` are the incarnations of every prefill rank that this rank receives from, or only that of their rank 0
        if it can be dialed. Pages and state slot belong to the receiver until Arrived or PagesFree. Raises
        InvalidRequest (room is active), Overloaded (too few record slots), Unavailable (a peer is not connected).
        """
        if room in self.rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        links = self._ranks.of(peers)
        whole = self.rooms.open(room, links, pages, held_pages, deadline, state_slot, self._clock())
        self._grant(whole)
        return whole.parts[0].generation

    def abort(self, room: int, reason: str, code: str = TransferFailed.code) -> None:
        """Give the room up: exactly one PagesFree follows, once nothing can be written to its pages any longer.

        Also takes back a room that has arrived and is not closed. Unknown rooms are ignored, and so are rooms that
        failed before, whose PagesFree follows in any case.
        """
        whole = self.rooms.get(room)
        if whole is None or whole.given_up:
            return
        self.counters.aborted += 1
        if whole.arrived:
            self._events = [e for e in self._events if not (isinstance(e, Arrived) and e.room == room)]
        self._give_up(whole, code, reason)

    def close(self, room: int) -> None:
        """End a room after Arrived was processed; its record slots become free. Unknown rooms are ignored."""
        whole = self.rooms.get(room)
        if whole is None:
            return
        if not whole.arrived:
            raise InternalError(f"room {room} closed while {whole.parts[0].state.value}; abort it instead")
        for inbound in whole.parts:
            inbound.go(ReceiveState.CLOSED)
        self.rooms.remove(whole)

    def peer_lost(self, incarnation: str) -> None:
        """Treat this prefill node as dead. Its pages stay in quarantine until its death is proved or it answers."""
        if (link := self.links.get(incarnation)) is not None:
            self._lose(link, NodeLost.code, f"prefill node {link.node or incarnation} is gone")

    def link_lost(self, incarnation: str) -> None:
        """Fail the rooms of a broken connection. The prefill node may be alive; its rooms may be placed elsewhere."""
        if (link := self.links.get(incarnation)) is not None:
            reason = f"the link to prefill node {link.node or incarnation} is broken"
            self._lose(link, TransferFailed.code, reason)

    def link_works(self, incarnation: str) -> None:
        """Note that its process is connected, so it is only busy while Hello is unanswered; the router finds hangs."""
        if (link := self.links.get(incarnation)) is not None:
            link.connected_at = self._clock()

    def shutdown(self) -> None:
        """Withdraw the memory from all peers; the node ends."""
        self._endpoint.close()

    def poll(self) -> list[ReceiverEvent]:
        """Check every deadline and every quarantine; return the events since the last call."""
        now = self._clock()
        waiting = {part.link.incarnation for part in self.rooms.parts()}
        for link in list(self.links.values()):
            if link.unanswered(now, self._limits.handshake_timeout):
                self.counters.timeouts["handshake"] += 1
                waited = now - link.greeted_at
                self._refused(link, f"the prefill node did not answer Hello within {waited:.0f} s")
            elif link.state is LinkState.READY and self._endpoint.peer_is_dead(link.incarnation):
                self._lose(link, NodeLost.code, f"the process of prefill node {link.node} ended")
            elif link.state is LinkState.LOST and link.incarnation not in waiting:
                del self.links[link.incarnation]
                self._endpoint.forget(link.incarnation)
        for inbound in self.rooms.parts():
            self._watch(inbound, now)
        events, self._events = self._events, []
        return events

    # ---- messages from prefill nodes

    def handle(self, peer_incarnation: str, message: bytes) -> None:
        """Process a frame from the socket to that incarnation. No content of it raises."""
        link = self.links.get(peer_incarnation)
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
        elif isinstance(decoded, messages.Refused):
            self._refused(link, decoded.reason)
        elif isinstance(decoded, messages.HelloNeeded):
            # Else this node has noticed its loss since it sent the slots, and given their rooms up.
            if link.state is LinkState.READY:
                self._events.append(PeerForgot(link.incarnation))
                self._lose(link, NodeLost.code, f"prefill node {link.node} was told that this node is gone")
        elif isinstance(decoded, messages.Working):
            self.heartbeats.handle(link, decoded)
        else:
            self._handle_room(link, decoded)

    def _welcome(self, link: Link, welcome: Welcome) -> None:
        if link.state is not LinkState.GREETING:
            self.counters.duplicates += 1
            return
        try:
            self._endpoint.admit(link.incarnation, welcome.process)
            link.welcomed(welcome, self._layout)
            self.dial_ranks(link.incarnation)
        except (HandshakeRefused, RequestError, ValueError) as error:
            self._refused(link, str(error))
            return
        for inbound in self.rooms.parts(link):
            if inbound.state is ReceiveState.QUEUED:
                self._complete(inbound)

    def _complete(self, inbound: Inbound) -> None:
        """Add the parts of a room that only its peer's Welcome has named, and grant what can be granted."""
        whole = self.rooms.of(inbound)
        try:
            self.rooms.complete(whole, self._ranks.of([inbound.link.incarnation]), self._clock())
        except RequestError as error:
            self._fail(inbound, error.code, str(error))
        else:
            self._grant(whole)

    def _handle_room(
        self, link: Link, message: PagesWritten | RecordWritten | SenderFailed | AbortAck
    ) -> None:
        whole = self.rooms.get(message.room)
        inbound = None if whole is None else whole.part_of(link)
        if inbound is None:
            if not isinstance(message, AbortAck):  # fenced rooms are freed without waiting for it
                self.counters.unknown_room += 1
        elif message.generation != inbound.generation:
            self.counters.stale_generation += 1
        elif inbound.state is ReceiveState.QUARANTINED:
            if not isinstance(message, PagesWritten):  # every other message says that no write is outstanding
                self._free(inbound)
        elif inbound.state in (ReceiveState.ARRIVED, ReceiveState.FREED):
            self.counters.duplicates += inbound.state is ReceiveState.ARRIVED or not isinstance(
                message, AbortAck
            )
        elif inbound.state is ReceiveState.QUEUED:
            self.counters.unknown_room += 1  # this generation was never sent to anybody
        elif isinstance(message, PagesWritten):
            inbound.progress(message, self.counters, self._clock())
        elif isinstance(message, RecordWritten):
            self._verify(inbound, message)
        elif isinstance(message, SenderFailed):
            self._free(inbound, message.code, message.reason)
        else:
            self.counters.duplicates += 1

    def _verify(self, inbound: Inbound, message: RecordWritten) -> None:
        # The sender is done: anything that arrives from now on does not belong to this transfer.
        self._endpoint.revoke(inbound.generation)
        try:
            checksums, now = self._limits.verify_checksums, self._clock()
            inbound.verify(self._endpoint, message, checksums, self._later, now)
        except RecordError as error:
            self._free(inbound, self.counters.record_failed(error.cause), str(error))
            return
        inbound.go(ReceiveState.ARRIVED)
        whole = self.rooms.of(inbound)
        if whole.arrived:
            self.rooms.release_memory(whole)
            self.counters.arrived += 1
            self.counters.pages_received += len(whole.pages)
            self._events.append(Arrived(whole.room, whole.record, whole.times, whole.checks))

    # ---- ends

    def _watch(self, inbound: Inbound, now: float) -> None:
        if inbound.active:
            overdue = inbound.overdue(now, self._limits)
            if overdue is not None:
                cause, code, reason = overdue
                self.counters.timeouts[cause] += 1
                self._fail(inbound, code, reason)
        elif inbound.state is ReceiveState.QUARANTINED:
            if self._endpoint.peer_is_dead(inbound.link.incarnation):
                self._free(inbound)
            elif now - inbound.moved_at >= self._limits.abort_retry:
                self.counters.abort_retries += 1
                self._notify_abort(inbound)

    def _fail(self, inbound: Inbound, code: str, reason: str) -> None:
        """Fail the whole room."""
        whole = self.rooms.of(inbound)
        if not whole.given_up:
            self.counters.failed += 1
            self._events.append(RoomFailed(whole.room, code, reason))
            self._give_up(whole, code, reason)

    def _give_up(self, whole: InboundRoom, code: str, reason: str) -> None:
        """Free every part that no sender can write any longer; the others are freed or quarantined one by one."""
        whole.given_up = True
        for inbound in whole.parts:
            if inbound.state is ReceiveState.ARRIVED:
                self._free(inbound)
            elif inbound.active:
                self._abandon(inbound, code, reason)

    def _abandon(self, inbound: Inbound, code: str, reason: str) -> None:
        """Give up a part whose sender may be writing: free it if that is safe, else quarantine it."""
        if inbound.state is ReceiveState.QUEUED:
            self._free(inbound)
            return
        inbound.aborted_for = (code, reason)
        fenced = self._endpoint.revoke(inbound.generation)
        if not self._endpoint.peer_is_dead(inbound.link.incarnation):
            self._notify_abort(inbound)
            if not fenced:
                inbound.go(ReceiveState.QUARANTINED)
                self.counters.quarantined += 1
                return
        self._free(inbound)

    def _free(self, inbound: Inbound, code: str = "", reason: str = "") -> None:
        """Free a part that has no outstanding write. With a code the room fails, unless it has failed before."""
        whole = self.rooms.of(inbound)
        if inbound.state is not ReceiveState.QUEUED:
            self._endpoint.revoke(inbound.generation)
        inbound.go(ReceiveState.FREED)
        if code:
            self._fail(inbound, code, reason)
        if whole.freed and self.rooms.get(whole.room) is whole:
            self.rooms.remove(whole)
            self.rooms.release_memory(whole)
            self._events.append(PagesFree(whole.room, whole.pages))

    def _refused(self, link: Link, reason: str) -> None:
        if link.state is LinkState.LOST:
            return
        self.counters.refused += 1
        self._events.append(PeerRefused(link.incarnation, reason))
        self._lose(link, TransferFailed.code, reason)

    def _lose(self, link: Link, code: str, reason: str) -> None:
        """Fail the rooms of this link; those that the peer may be writing to go into quarantine."""
        if link.state is LinkState.LOST:
            return
        link.state = LinkState.LOST
        self._endpoint.expel(link.incarnation)
        for inbound in self.rooms.parts(link):
            if inbound.active:
                self._fail(inbound, code, reason)

    # ---- messages to prefill nodes

    def _grant(self, whole: InboundRoom) -> None:
        """Send the destinations to those peers of a room that are ready."""
        for inbound in whole.parts:
            if inbound.link.state is LinkState.READY and inbound.state is ReceiveState.QUEUED:
                self._send_slots(inbound)

    def _send_slots(self, inbound: Inbound) -> None:
        """Send the destinations to a peer that is ready, unless the room lacks one of the ranks that it needs."""
        if (missing := self.rooms.of(inbound).missing(self._layout)) is not None:
            self._fail(inbound, TransferFailed.code, missing)
            return
        inbound.go(ReceiveState.AWAITING)
        inbound.moved_at = self._clock()
        self._endpoint.announce(inbound.window)
        self._notify(inbound.link, inbound.slots(self._clock()))

    def _notify_abort(self, inbound: Inbound) -> None:
        inbound.moved_at = self._clock()
        self._notify(inbound.link, inbound.abort())

    def _notify(self, link: Link, message: ToSender) -> None:
        if link.send(messages.encode(message, self._incarnation)) is False:
            self.counters.unsent += 1
