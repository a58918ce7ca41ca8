"""The prefill node's end of every transfer: many decode nodes, one Sender."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from kv_transfer import messages
from kv_transfer.counters import SenderCounters
from kv_transfer.early_slots import EarlySlots
from kv_transfer.events import Delivered, SenderEvent, SlotsGranted, TransferLost
from kv_transfer.expiring import ExpiringMap
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.handshake import Peer, PeerTable, Refusal
from kv_transfer.layer_send import LayerSend
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import Abort, AbortAck, Hello, ReceiverInbox, Refused, SenderFailed, Slots, Welcome
from kv_transfer.outbound import Outbound
from kv_transfer.signs import SenderSigns
from kv_transfer.state import SendState
from kv_transfer.transport.base import SenderEndpoint
from kv_transfer.transport.layers import LayerEndpoint
from kv_transfer.transport.one_host import process

__all__ = ["Delivered", "GrantedSlots", "Sender", "SenderEvent", "SlotsGranted", "TransferLost"]


@dataclass(frozen=True, slots=True)
class GrantedSlots:
    """What the decode node set aside. Logical pages held_pages .. held_pages+num_pages-1 are to be sent."""

    held_pages: int
    num_pages: int
    generation: int
    incarnation: str  # of the decode node


class Sender:
    """Poll-driven; one thread.

    `endpoint.register(layout, kv)` has been called. `send(peer identity, frame)` must not block; False
    means that the frame was not taken. `clock` gives monotonic seconds.
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
    ) -> None:
        if endpoint.layout != layout:
            raise ValueError("the endpoint was registered with another layout")
        self.counters = SenderCounters()
        self._incarnation = incarnation
        self._node = node
        self._endpoint = endpoint
        self._send = send
        self._clock = clock
        self._limits = limits
        self._process = process.current()
        self._rooms: dict[int, Outbound] = {}
        self._busy: dict[int, Outbound] = {}  # those of _rooms that every poll looks at
        self._alarms: list[tuple[float, int]] = []  # heap of (when, room): the others are looked at then
        self._events: list[SenderEvent] = []
        self._early = EarlySlots(limits, clock)
        self._ended: ExpiringMap[int, tuple[str, str]] = ExpiringMap(
            limits.early_slots, limits.early_ttl, clock
        )
        self._aborted: ExpiringMap[int, Abort] = ExpiringMap(limits.early_slots, limits.early_ttl, clock)
        self._retired: ExpiringMap[str, str] = ExpiringMap(limits.max_peers, 3600.0, clock)
        self.peers = PeerTable(endpoint, limits, self._retired)
        self.signs = SenderSigns(self._rooms, self.peers.all, self._say, clock)

    @property
    def active(self) -> int:
        """Rooms that are expected and neither delivered nor lost, draining ones included."""
        return len(self._rooms)

    @property
    def writing(self) -> bool:
        """Some write is not known to have settled: poll again soon, no message will tell."""
        return any(not room.settled for room in self._busy.values())

    @property
    def draining(self) -> int:
        """Rooms that ended but whose writes have not settled; one that stays here is poisoned."""
        return sum(room.state is SendState.DRAINING for room in self._busy.values())

    # ---- what the prefill node wants

    def expect(self, room: int, deadline: float | None = None, decode: str = "") -> None:
        """The prompt of this room is here.

        `deadline` is on the sender's clock. `decode` is the incarnation that may grant slots, "" for any;
        when it is lost the room is lost. Raises InvalidRequest if the room is active.
        """
        if room in self._rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        peer = self.peers.find(decode)
        since = self._clock() if peer is None else max(self._clock(), peer.busy_until)
        outbound = Outbound(room, self._endpoint, self._limits, self.counters, since, deadline, decode)
        self._rooms[room] = outbound
        self._ended.pop(room)
        early = self._early.take(room)
        aborted = self._aborted.get(room)
        if early is not None and outbound.accepts(early.peer):
            self._grant(outbound, early.peer, early.slots, early.received_at)
        elif early is not None:
            self._decline(
                early.peer, early.slots, TransferFailed.code, "the room belongs to another decode node"
            )
        elif aborted is not None:
            outbound.give_up(aborted.code, aborted.reason)
        self._watch(outbound)

    def slots(self, room: int) -> GrantedSlots | None:
        """None while the decode node has not granted, and for rooms that are lost."""
        outbound = self._rooms.get(room)
        if outbound is None or outbound.failure is not None:
            return None
        peer, slots = outbound.peer, outbound.slots
        if peer is None or slots is None:
            return None
        return GrantedSlots(slots.held_pages, len(slots.pages), slots.generation, peer.incarnation)

    def send_pages(self, room: int, src_pages: Sequence[int], first: int) -> None:
        """Write own pages as logical pages first.. of the request: each once, in order, from held_pages on.

        The source must be complete and must not change until Delivered or TransferLost. Does nothing for a
        room that was lost a moment ago; InternalError for misuse.
        """
        outbound = self._room(room)
        if outbound is not None:
            outbound.send_pages(src_pages, first, self._clock())
            self._advance(outbound)

    def follow(self) -> LayerSend:
        """For a forward that is about to write pages of rooms; behind it, `complete` is to be told of each.

        InternalError where the transport cannot take layers.
        """
        if not isinstance(self._endpoint, LayerEndpoint):
            raise InternalError(f"{type(self._endpoint).__name__} takes whole pages alone")
        return LayerSend(self._endpoint, self._room, self._limits.verify_checksums, self._clock)

    def complete(self, room: int, end: int) -> None:
        """Logical pages below `end` are complete: write the planes of followed ones that have not left."""
        outbound = self._room(room)
        if outbound is not None:
            outbound.complete(end, self._clock())
            self._advance(outbound)

    def finish(self, room: int, record: HandoffRecord) -> None:
        """Every page was sent: write the record once all have landed. Page checksums are filled in here."""
        outbound = self._room(room)
        if outbound is not None:
            outbound.finish(record)
            self._advance(outbound)

    def cancel(self, room: int, code: str, reason: str) -> None:
        """The request ended here: settle what is outstanding, tell the decode node, then TransferLost.

        Slots that come later are answered in the same way. Unknown and ended rooms are ignored.
        """
        outbound = self._rooms.get(room)
        if outbound is not None:
            outbound.give_up(code, reason)
            self._advance(outbound)

    def peer_lost(self, incarnation: str) -> None:
        """This decode node is gone: its rooms are lost, its memory is let go of."""
        peer = self.peers.find(incarnation)
        if peer is not None:
            self._drop(peer, f"decode node {peer.hello.node} is gone")
        for outbound in [each for each in self._rooms.values() if each.decode == incarnation]:
            outbound.give_up(NodeLost.code, "the decode node is gone")
            self._advance(outbound)

    def poll(self) -> list[SenderEvent]:
        """Advance the rooms that have something to do; what happened since the last call."""
        self.signs.tell()
        for outbound in list(self._busy.values()):
            self._advance(outbound)
        now = self._clock()
        while self._alarms and self._alarms[0][0] <= now:
            due = self._rooms.get(heapq.heappop(self._alarms)[1])
            if due is not None:
                self._advance(due)
                self._watch(due)
        for early in self._early.expire():
            self.counters.early_evicted += 1
            self._decline(
                early.peer, early.slots, TransferFailed.code, "no prompt came for this room in time"
            )
        self._ended.expire()
        self._aborted.expire()
        self._retired.expire()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """The node ends: every room is lost, every peer detached."""
        for peer in self.peers.all():
            self._drop(peer, "this prefill node shuts down")
        self._endpoint.close()

    # ---- what decode nodes say

    def handle(self, peer: bytes, message: bytes) -> None:
        """`message` is a frame from the socket of `peer`. Whatever it says, nothing is raised."""
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
            return  # the socket belongs to a newer life: it must not be answered for an older one
        if isinstance(decoded, Abort):
            self._abort(peer, incarnation, known, decoded)
        elif isinstance(decoded, messages.Queued):
            self.signs.heard(known, decoded)
        elif known is None:
            self._refuse(
                peer, Refusal("no_hello", "slots came before Hello: this prefill node does not know you")
            )
        else:
            self._slots(known, decoded)

    def _hello(self, identity: bytes, incarnation: str, hello: Hello) -> None:
        try:
            self.peers.check(incarnation, hello)
            for old in self.peers.outlived(identity, incarnation, hello):
                if old.incarnation != incarnation:
                    self._retired.put(old.incarnation, incarnation)
                self._drop(old, f"decode node {old.hello.node} started anew")
            self.peers.admit(identity, incarnation, hello)
        except Refusal as error:
            self._refuse(identity, error)
            return
        self.counters.handshakes += 1
        self._say(identity, Welcome(self._node, self._process))

    def _slots(self, peer: Peer, slots: Slots) -> None:
        """Grant, keep for a prompt that has not come yet, or answer at once that nothing will be written."""
        room = slots.room
        outbound = self._rooms.get(room)
        aborted = self._aborted.get(room)
        rejected = peer.rejects(slots)
        if rejected is not None:
            self.counters.invalid_slots += 1
            self._decline(peer, slots, TransferFailed.code, f"slots refused: {rejected}")
        elif aborted is not None and aborted.generation >= slots.generation:
            self._say(peer.identity, AbortAck(room, slots.generation))
        elif outbound is None:
            ended = self._ended.get(room)
            if ended is not None:
                self._decline(peer, slots, *ended)
            else:
                self._keep(peer, slots)
        elif outbound.slots is not None:
            self._again(peer, slots, outbound.peer, outbound.slots)
        elif outbound.failure is not None:
            self._decline(peer, slots, *outbound.failure)
        elif not outbound.accepts(peer):
            self._decline(peer, slots, TransferFailed.code, "the room belongs to another decode node")
        else:
            self._grant(outbound, peer, slots, self._clock())

    def _keep(self, peer: Peer, slots: Slots) -> None:
        kept = self._early.get(slots.room)
        if kept is not None:
            self._again(peer, slots, kept.peer, kept.slots)
        elif self._early.full(peer, slots):
            self.counters.early_evicted += 1
            self._decline(peer, slots, Overloaded.code, "too many slots without a prompt")
        else:
            self.counters.early_slots += 1
            for early in self._early.put(peer, slots):
                self.counters.early_evicted += 1
                self._decline(early.peer, early.slots, Overloaded.code, "too many slots without a prompt")

    def _again(self, peer: Peer, slots: Slots, first_peer: Peer | None, first: Slots) -> None:
        """Slots for a room that has some: a repetition is ignored, another grant declined."""
        self.counters.duplicate_slots += 1
        if peer is not first_peer or slots.generation != first.generation:
            self._decline(peer, slots, TransferFailed.code, "this room was granted slots before")

    def _abort(self, identity: bytes, incarnation: str, peer: Peer | None, abort: Abort) -> None:
        """Acknowledge once nothing of that generation is outstanding: at once, unless its room has writes."""
        outbound = self._rooms.get(abort.room)
        if outbound is not None and outbound.is_of(peer, abort.generation):
            outbound.abort_asked = True
            outbound.give_up(abort.code, abort.reason)
            self._advance(outbound)
            return
        if peer is not None:
            early = self._early.get(abort.room)
            if early is not None and early.peer is peer and early.slots.generation <= abort.generation:
                self._early.take(abort.room)
            self._aborted.put(abort.room, abort)
            if outbound is not None and outbound.slots is None and outbound.accepts(peer):
                outbound.give_up(abort.code, abort.reason)  # the abort came without its slots
                self._advance(outbound)
        if self._endpoint.quiet(incarnation):  # else it asks again
            self._say(identity, AbortAck(abort.room, abort.generation))

    # ---- the way out

    def _grant(self, outbound: Outbound, peer: Peer, slots: Slots, received_at: float) -> None:
        outbound.grant(peer, slots, received_at)
        self._watch(outbound)
        self._events.append(SlotsGranted(outbound.room))

    def _advance(self, outbound: Outbound) -> None:
        if outbound.ended:
            return
        for message in outbound.advance(self._clock()):
            if outbound.peer is not None and not outbound.peer.lost:
                self._say(outbound.peer.identity, message)
        if not outbound.ended:
            if outbound.busy:
                self._busy[outbound.room] = outbound
            else:
                self._busy.pop(outbound.room, None)
            return
        del self._rooms[outbound.room]
        self._busy.pop(outbound.room, None)
        if outbound.failure is None:
            self.counters.delivered += 1
            self._events.append(Delivered(outbound.room))
        else:
            self.counters.lost += 1
            self._ended.put(outbound.room, outbound.failure)
            self._events.append(TransferLost(outbound.room, *outbound.failure))

    def _watch(self, outbound: Outbound) -> None:
        """Look at the room in every poll, or else when its time is over."""
        if outbound.ended:
            return
        if outbound.busy:
            self._busy[outbound.room] = outbound
        elif outbound.alarm < float("inf"):
            heapq.heappush(self._alarms, (outbound.alarm, outbound.room))
            if len(self._alarms) > 4 * len(self._rooms) + 64:  # alarms of rooms that ended in time
                alive = [(room.alarm, room.room) for room in self._rooms.values()]
                self._alarms = [alarm for alarm in alive if alarm[0] < float("inf")]
                heapq.heapify(self._alarms)

    def _drop(self, peer: Peer, reason: str) -> None:
        rooms = [room for room in self._rooms.values() if room.peer is peer]
        for outbound in rooms:
            outbound.give_up(NodeLost.code, reason)
        self._early.forget(peer)
        self.peers.drop(peer)
        for outbound in rooms:
            self._advance(outbound)

    def _decline(self, peer: Peer, slots: Slots, code: str, reason: str) -> None:
        """Nothing was written for this generation and nothing will be."""
        if not peer.lost:
            self._say(peer.identity, SenderFailed(slots.room, slots.generation, code[:64], reason[:4096]))

    def _refuse(self, identity: bytes, refusal: Refusal) -> None:
        self.counters.refused[refusal.cause] += 1
        self._say(identity, Refused(str(refusal)[:4096]))

    def _say(self, identity: bytes, message: ReceiverInbox) -> None:
        if self._send(identity, messages.encode(message, self._incarnation)) is False:
            self.counters.unsent += 1

    def _room(self, room: int) -> Outbound | None:
        """None for a room that was lost a moment ago. Raises InternalError for one that never was."""
        outbound = self._rooms.get(room)
        if outbound is None and room not in self._ended:
            raise InternalError(f"room {room} is not expected here")
        return outbound
