"""The prefill node's end of every transfer: many decode nodes, one Sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import (
    HandshakeRefused,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    ProtocolError,
    TransferFailed,
)
from common.kv_cache.pool_layout import PoolLayout
from common.messages.identity import rank_incarnation
from kv_transfer import messages
from kv_transfer.busy_rooms import BusyRooms
from kv_transfer.counters import SenderCounters
from kv_transfer.early_slots import NO_PROMPT, EarlySlots
from kv_transfer.events import Delivered, SenderEvent, SlotsGranted, TransferLost
from kv_transfer.expiring import EXPIRE_INTERVAL, ExpiringMap
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.handshake import Peer, PeerTable, Refusal
from kv_transfer.layer_send import LayerSend
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import AbortAck, AbortTransfer, Hello, Refused, SenderFailed, Slots, ToReceiver
from kv_transfer.outbound import Outbound
from kv_transfer.outbound_room import GrantedSlots, OutboundRoom
from kv_transfer.room_alarms import RoomAlarms
from kv_transfer.sender_heartbeats import SenderHeartbeats
from kv_transfer.transport.base import SenderEndpoint
from kv_transfer.transport.layers import LayerEndpoint
from kv_transfer.transport.one_host import process

__all__ = ["Delivered", "GrantedSlots", "Sender", "SenderEvent", "SlotsGranted", "TransferLost"]


class Sender:
    """Sends pages and records. It is poll-driven and used from one thread.

    `incarnation` is the node's: that of its rank in `layout` follows. `endpoint.register(layout, kv)` has been called.
    `send(peer identity, frame)` must not block; False: the frame was not accepted. `keeps_name`: see PeerTable.
    """

    def __init__(
        self,
        incarnation: str,
        node: str,
        endpoint: SenderEndpoint,
        layout: PoolLayout,
        send: Callable[[bytes, bytes], object],
        clock: Callable[[], float],
        limits: TransferLimits,
        keeps_name: Callable[[bytes], bool] = lambda identity: False,
    ) -> None:
        if endpoint.layout != layout:
            raise ValueError("the endpoint was registered with another layout")
        self.counters = SenderCounters()
        self._incarnation = rank_incarnation(incarnation, layout.tp_rank)
        self._node = node
        self.addresses: tuple[str, ...] = ()  # rank 0: of the peer sockets of all ranks; set at start
        self.endpoint = endpoint
        self._send = send
        self._clock = clock
        self._limits = limits
        self._process = process.current()
        self.rooms: dict[int, OutboundRoom] = {}
        self._busy = BusyRooms(clock)
        self.alarms = RoomAlarms(self.rooms)  # of the other rooms
        self._events: list[SenderEvent] = []
        self.early = EarlySlots(limits, clock)
        bounds = limits.early_slots, limits.early_ttl, clock
        self.ended: ExpiringMap[int, tuple[str, str]] = ExpiringMap(*bounds)
        self.aborted: ExpiringMap[int, tuple[str, AbortTransfer]] = ExpiringMap(*bounds)  # incarnation, abort
        self._retired: ExpiringMap[str, str] = ExpiringMap(limits.max_peers, 3600.0, clock)
        self.peers = PeerTable(endpoint, limits, self._retired, keeps_name)
        self.heartbeats = SenderHeartbeats(self.rooms, self.peers.all, self._notify, clock)
        self._expired_at = clock()  # when what expires was last looked at

    @property
    def active(self) -> int:
        """Number of rooms that are expected and neither delivered nor lost, draining ones included."""
        return len(self.rooms)

    @property
    def poll_interval(self) -> float | None:
        """Seconds after which to poll again, since no message announces the end of a write; None if all settled."""
        return self._busy.poll_interval

    @property
    def draining(self) -> int:
        """Number of rooms that ended with unsettled writes; one that stays here is poisoned."""
        return self._busy.draining

    # ---- called by the prefill node

    def expect(
        self, room: int, deadline: float | None = None, decodes: Sequence[str] = ("",), pages: int = 0
    ) -> None:
        """Register a room whose prompt has arrived.

        `deadline` is on the sender's clock. `decodes` are the incarnations that grant slots, "" for any; when one is
        lost the room is lost. Other ranks of their nodes to which this rank sends are added once one of them grants.
        `pages`: of the prompt, 0: any; slots for others are declined. Raises InvalidRequest if the room is active.
        """
        if room in self.rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        parts = [self._part(room, deadline, decode) for decode in decodes]
        expected = self.rooms[room] = OutboundRoom(room, parts, pages)
        self.ended.pop(room)
        for early in self.early.take_all(room):
            self._grant(expected, early.peer, early.slots, early.received_at)
        if (aborted := self.aborted.get(room)) is not None and expected.granted is None:
            expected.give_up(aborted[1].code, aborted[1].reason)
        self._watch(expected)

    def _part(self, room: int, deadline: float | None, decode: str) -> Outbound:
        peer, now = self.peers.find(decode), self._clock()
        busy_until = 0.0 if peer is None else peer.busy_until
        return Outbound(room, self.endpoint, self._limits, self.counters, now, busy_until, deadline, decode)

    def slots(self, room: int) -> GrantedSlots | None:
        """Return the grant; None while a decode rank has not granted, and for a lost room."""
        expected = self.rooms.get(room)
        return None if expected is None else expected.granted

    def send_pages(self, room: int, src_pages: Sequence[int], first: int) -> None:
        """Write own pages as logical pages first.. of the request: each once, in order, from held_pages on.

        The source must be complete and must not change until Delivered or TransferLost. Does nothing for a room that
        has just been lost; raises InternalError for misuse.
        """
        for part in self._parts(room):
            part.send_pages(src_pages, first, self._clock())
        self._advance(room)

    def follow(self) -> LayerSend:
        """Return the layer-wise sender for a forward that is about to write pages of rooms.

        Call `complete` for each room after the forward. Raises InternalError if the transport cannot send layers.
        """
        if not isinstance(self.endpoint, LayerEndpoint):
            raise InternalError(f"{type(self.endpoint).__name__} sends whole pages only")
        return LayerSend(self.endpoint, self._parts, self._limits.verify_checksums, self._clock)

    def complete(self, room: int, end: int) -> None:
        """Write the remaining planes of followed pages, now that logical pages below `end` are complete."""
        for part in self._parts(room):
            part.complete(end, self._clock())
        self._advance(room)

    def finish(self, room: int, record: HandoffRecord, state_slot: int = 0) -> None:
        """Write the state of `state_slot` (0: none), then, once all pages have landed, the record."""
        for part in self._parts(room):
            part.finish(record, state_slot, self._clock())
        self._advance(room)

    def cancel(self, room: int, code: str, reason: str) -> None:
        """End a room on this side: settle outstanding writes, notify the decode node, then return TransferLost.

        Slots that arrive later get the same answer. Unknown and ended rooms are ignored.
        """
        expected = self.rooms.get(room)
        if expected is not None:
            expected.give_up(code, reason)
            self._advance(room)

    def peer_lost(self, incarnation: str) -> None:
        """Drop a decode node that is gone: its rooms are lost, the memory of all its ranks is detached."""
        for peer in self.peers.all():
            if incarnation in (peer.leader, peer.incarnation):
                self._drop(peer, f"decode node {peer.hello.node} is gone")
        for room in list(self.rooms.values()):
            if any(part.decode == incarnation for part in room.parts):
                room.give_up(NodeLost.code, "the decode node is gone")
                self._advance(room.room)

    def poll(self) -> list[SenderEvent]:
        """Advance the rooms that have something to do; return the events since the last call."""
        self.heartbeats.send_due()
        for room in self._busy:
            self._advance(room)
        for due in self.alarms.due(now := self._clock()):
            self._advance(due.room)
            self._watch(due)
        if now - self._expired_at >= EXPIRE_INTERVAL:
            self._expired_at = now
            self._expire()
        events, self._events = self._events, []
        return events

    def _expire(self) -> None:
        for early in self.early.expire():
            self.counters.early_evicted += 1
            self._decline(early.peer, early.slots, TransferFailed.code, NO_PROMPT)
        for entries in (self.ended, self.aborted, self._retired):
            entries.expire()

    def close(self) -> None:
        """End all rooms and detach all peers; the node shuts down."""
        for peer in self.peers.all():
            self._drop(peer, "this prefill node shuts down")
        self.endpoint.close()

    # ---- messages from decode nodes

    def handle(self, peer: bytes, message: bytes) -> None:
        """Process a frame from the socket of `peer`. No content of it raises."""
        try:
            incarnation, decoded = messages.decode_for_sender(message)
        except HandshakeRefused as error:
            self._refuse(peer, Refusal("version", str(error)))
            return
        except ProtocolError:
            self.counters.malformed += 1
            return
        if isinstance(decoded, Hello):
            self._hello(peer, incarnation, decoded)
            return
        known = self.peers.at(peer)
        if incarnation in self._retired or (known is not None and known.incarnation != incarnation):
            self.counters.stale_incarnation += 1
        if known is not None and known.incarnation != incarnation:
            return  # the socket belongs to a newer incarnation, which must not get answers for an older one
        if isinstance(decoded, AbortTransfer):
            self._abort(peer, incarnation, known, decoded)
        elif isinstance(decoded, messages.Queued):
            self.alarms.add(*self.heartbeats.handle(known, decoded))
        elif known is None:
            self.counters.ungreeted_slots += 1
            self._notify(peer, messages.HelloNeeded())
        else:
            self._slots(known, decoded)

    def _hello(self, identity: bytes, incarnation: str, hello: Hello) -> None:
        try:
            self.peers.check(identity, incarnation, hello)
            for old in self.peers.replaced(identity, incarnation, hello):
                for gone in {old.incarnation, old.leader} - {incarnation, hello.leader}:
                    self._retired.put(gone, incarnation)
                self._drop(old, f"decode node {old.hello.node} restarted")
            self.peers.admit(identity, incarnation, hello)
        except Refusal as error:
            self._refuse(identity, error)
            return
        self.counters.handshakes += 1
        layout = self.endpoint.layout
        who = layout.tp_rank, layout.tp_size
        self._notify(identity, messages.Welcome(self._node, self._process, *who, self.addresses))

    def _slots(self, peer: Peer, slots: Slots) -> None:
        """Grant the slots, keep them for a prompt that has not arrived yet, or decline them at once."""
        room = slots.room
        expected = self.rooms.get(room)
        who, aborted = self.aborted.get(room) or ("", None)
        rejected = peer.rejects(slots)
        if rejected is not None:
            self.counters.invalid_slots += 1
            self._decline(peer, slots, TransferFailed.code, f"slots refused: {rejected}")
        elif aborted is not None and who == peer.incarnation and aborted.generation >= slots.generation:
            self._acknowledge(peer.identity, who, AbortAck(room, slots.generation))
        elif expected is not None:
            self._grant(expected, peer, slots, self._clock())
        else:
            ended = self.ended.get(room)
            if ended is not None:
                self._decline(peer, slots, *ended)
            else:
                self._keep(peer, slots)

    def _keep(self, peer: Peer, slots: Slots) -> None:
        kept = self.early.get(slots.room, peer.incarnation)
        if kept is not None:
            self._again(peer, slots, kept.slots)
        elif self.early.full(peer, slots):
            self.counters.early_evicted += 1
            self._decline(peer, slots, Overloaded.code, "too many slots without a prompt")
        else:
            self.counters.early_slots += 1
            for early in self.early.put(peer, slots):
                self.counters.early_evicted += 1
                self._decline(early.peer, early.slots, Overloaded.code, "too many slots without a prompt")

    def _again(self, peer: Peer, slots: Slots, first: Slots | None) -> None:
        """Process slots for a room that already has some: ignore a repetition of `first`, decline another grant."""
        self.counters.duplicate_slots += 1
        if first is None or slots.generation != first.generation:
            self._decline(peer, slots, TransferFailed.code, "this room was granted slots before")

    def _abort(self, identity: bytes, incarnation: str, peer: Peer | None, abort: AbortTransfer) -> None:
        """Acknowledge once no write of that generation is outstanding: at once, unless its room has writes."""
        expected = self.rooms.get(abort.room)
        part = None if expected is None or peer is None else expected.part_of(peer)
        if expected is not None and part is not None and part.is_of(peer, abort.generation):
            part.abort_asked = True
            expected.give_up(abort.code, abort.reason)
            self._advance(abort.room)
            return
        if peer is not None:
            early = self.early.get(abort.room, incarnation)
            if early is not None and early.slots.generation <= abort.generation:
                self.early.take(abort.room, incarnation)
            self.aborted.put(abort.room, (incarnation, abort))
            if expected is not None and part is not None and part.slots is None:
                expected.give_up(abort.code, abort.reason)  # the abort arrived before its slots
                self._advance(abort.room)
        self._acknowledge(identity, incarnation, AbortAck(abort.room, abort.generation))

    def _acknowledge(self, identity: bytes, incarnation: str, ack: AbortAck) -> None:
        """Confirm that nothing of a generation lands any more. While something may, the decode node asks again."""
        if self.endpoint.writes_ended(incarnation, ack.generation):
            self._notify(identity, ack)

    # ---- state changes and messages to decode nodes

    def _grant(self, expected: OutboundRoom, peer: Peer, slots: Slots, received_at: float) -> None:
        """Take the slots for the part of this decode rank, or decline them with a reason."""
        for decode in expected.missing(peer):
            expected.parts.append(self._part(expected.room, expected.parts[0].deadline, decode))
        part = expected.part_of(peer)
        if part is None and all(each.slots is None for each in expected.parts):
            self._decline(peer, slots, TransferFailed.code, "the room belongs to another decode node")
        elif expected.failure is not None and (part is None or part.slots is None):
            self._decline(peer, slots, *expected.failure)
        elif part is None or part.slots is not None:
            self._again(peer, slots, None if part is None else part.slots)
        elif rejected := expected.rejects(slots):
            self._decline(peer, slots, TransferFailed.code, rejected)
        else:
            part.grant(peer, slots, received_at)
            self._watch(expected)
            if expected.granted is not None:
                self._events.append(SlotsGranted(expected.room))

    def _advance(self, number: int) -> None:
        """Advance a room and notify its decode ranks; once a part has failed, all are given up."""
        room = self.rooms.get(number)
        if room is None:
            return
        self._advance_parts(room)
        failure = room.failure
        if failure is not None and not room.ended:
            room.give_up(*failure)
            self._advance_parts(room)
        if not room.ended:
            self._busy.update(room, room.busy)
            return
        del self.rooms[number]
        self._busy.update(room, False)
        if failure is None:
            self.counters.room_delivered(room.bytes_written)
            self._events.append(Delivered(number))
        else:
            self.counters.lost += 1
            self.ended.put(number, failure)
            self._events.append(TransferLost(number, *failure))

    def _advance_parts(self, room: OutboundRoom) -> None:
        for part in room.parts:
            for message in part.advance(self._clock()):
                if part.peer is not None and not part.peer.lost:
                    self._notify(part.peer.identity, message)

    def _watch(self, room: OutboundRoom) -> None:
        """Arrange for the room to be advanced: in every poll if it is busy, else at its alarm."""
        if room.ended:
            return
        if not self._busy.update(room, room.busy):
            self.alarms.add(room)

    def _drop(self, peer: Peer, reason: str) -> None:
        rooms = [room for room in self.rooms.values() if any(part.peer is peer for part in room.parts)]
        for room in rooms:
            room.give_up(NodeLost.code, reason)
        self.early.forget(peer)
        self.peers.drop(peer)
        for room in rooms:
            self._advance(room.room)

    def _decline(self, peer: Peer, slots: Slots, code: str, reason: str) -> None:
        """Tell the decode node that nothing is or will be written for this generation, unless something may land."""
        if not peer.lost and self.endpoint.writes_ended(peer.incarnation, slots.generation):
            self._notify(peer.identity, SenderFailed(slots.room, slots.generation, code[:64], reason[:4096]))

    def _refuse(self, identity: bytes, refusal: Refusal) -> None:
        self.counters.refused[refusal.cause] += 1
        self._notify(identity, Refused(str(refusal)[:4096]))

    def _notify(self, identity: bytes, message: ToReceiver) -> None:
        if self._send(identity, messages.encode(message, self._incarnation)) is False:
            self.counters.unsent += 1

    def _parts(self, room: int) -> Sequence[Outbound]:
        """Return the parts of a room; none if it was lost. Raises InternalError if it was never expected."""
        expected = self.rooms.get(room)
        if expected is None and room not in self.ended:
            raise InternalError(f"room {room} is not expected here")
        return [] if expected is None else expected.parts
