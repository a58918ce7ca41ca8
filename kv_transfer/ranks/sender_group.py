"""All senders of a prefill node with several ranks, in the place of one Sender; used on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.errors import InternalError, InvalidRequest
from kv_transfer.counters import SenderCounters
from kv_transfer.cuts import sources
from kv_transfer.events import Delivered, SenderEvent, SlotsGranted, TransferLost
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.handshake import PeerTable
from kv_transfer.outbound_room import GrantedSlots
from kv_transfer.ranks.channel import FrameReader, FrameWriter, frames, send_message
from kv_transfer.ranks.group_heartbeats import GroupHeartbeats
from kv_transfer.ranks.sender_messages import (
    CancelRoom,
    ExpectRoom,
    ForgetDecode,
    RankDelivered,
    RankGranted,
    SenderReport,
    SendPages,
    reports,
)
from kv_transfer.send_order import SendOrder
from kv_transfer.sender import Sender


@dataclass(slots=True, eq=False)
class _SharedPrompt:
    """One request on all ranks that send a part of it."""

    room: int
    deadline: float | None
    pages: int
    announced: bool = False  # the other ranks that send a part of it know it
    granted: bool = False  # on rank 0, as its event says
    waiting: set[int] = field(default_factory=set)  # ranks that lack grants
    sending: set[int] = field(default_factory=lambda: {0})  # ranks that have neither delivered nor lost it
    failure: tuple[str, str] | None = None  # code, reason


class SenderGroup:
    """Has the methods and events of a Sender: a request is granted, delivered and lost on all ranks at once.

    The other ranks learn of a room once the decode node has granted it to rank 0, which always sends to rank 0 of that
    node; until then they keep grants of their own.
    """

    def __init__(
        self,
        local: Sender,
        addresses: Sequence[str],
        commands: FrameWriter,
        reports: Sequence[FrameReader],
    ) -> None:
        """Speak for all ranks.

        Args:
            local: the sender of rank 0.
            addresses: of the peer sockets of all ranks, rank 0 included.
            commands: reaches all other ranks.
            reports: reports[i] comes from rank i + 1.
        """
        layout = local.endpoint.layout
        if not len(addresses) == len(reports) + 1 == layout.tp_size:
            raise ValueError(f"{len(addresses)} addresses, {len(reports)} reports: {layout.tp_size} ranks")
        local.addresses = tuple(addresses)
        self._local = local
        self._layout = layout
        self._command_ranks = partial(send_message, commands)
        self._reports = reports
        self._rooms: dict[int, _SharedPrompt] = {}
        # number of ranks of a decode node -> own ranks that send to it, except rank 0
        self._others: dict[int, frozenset[int]] = {}
        self._events: list[SenderEvent] = []
        self.heartbeats = GroupHeartbeats(local.heartbeats.announce, self._command_ranks)

    @property
    def counters(self) -> SenderCounters:
        """Rank 0's own counters."""
        return self._local.counters

    @property
    def peers(self) -> PeerTable:
        """Rank 0's own peers."""
        return self._local.peers

    @property
    def active(self) -> int:
        return len(self._rooms)

    @property
    def poll_interval(self) -> float | None:
        """Seconds after which to poll again: for a write of rank 0, or at once for events that `slots` has caused."""
        return 0.0 if self._events else self._local.poll_interval

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors that are readable when another rank has reported something."""
        return [reader.fileno() for reader in self._reports]

    # ---- called by the prefill node

    def expect(
        self, room: int, deadline: float | None = None, decodes: Sequence[str] = ("",), pages: int = 0
    ) -> None:
        """Register a room whose prompt has arrived, as `Sender.expect` does. `decodes` names only a node's rank 0."""
        if room in self._rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        self._local.expect(room, deadline, decodes, pages)
        self._rooms[room] = _SharedPrompt(room, deadline, pages)

    def slots(self, room: int) -> GrantedSlots | None:
        """Return the grant; None until every rank has its own. It may be called while a forward is launched."""
        shared = self._rooms.get(room)
        granted = self._local.slots(room)
        if shared is None or granted is None:
            return None
        self._share(shared, granted)
        if shared.waiting:
            self._take_reports()
        return granted if not shared.waiting and shared.failure is None else None

    def order(self, order: SendOrder) -> None:
        """Let the other ranks send their parts too."""
        shared = self._rooms.get(order.room)
        if shared is None or not shared.sending - {0}:
            return
        if order.record is not None:
            # Only rank 0's record is used: the others are for the checksums of their parts.
            record = HandoffRecord(first_token=order.record.first_token, num_tokens=order.record.num_tokens)
            order = msgspec.structs.replace(order, record=record)
        self._command_ranks(SendPages(order))

    def cancel(self, room: int, code: str, reason: str) -> None:
        """End a room on all ranks, as `Sender.cancel` does."""
        shared = self._rooms.get(room)
        if shared is not None:
            self._give_up(shared, code, reason)

    def peer_lost(self, incarnation: str) -> None:
        """Drop a decode node that is gone, on all ranks. It is named by its rank 0."""
        self._local.peer_lost(incarnation)
        self._command_ranks(ForgetDecode(incarnation))

    def handle(self, peer: bytes, message: bytes) -> None:
        self._local.handle(peer, message)

    def poll(self) -> list[SenderEvent]:
        """Advance the rooms of rank 0 and take the reports of the others; return the events of all since then."""
        self._take_reports()
        for event in self._local.poll():
            shared = self._rooms[event.room]
            if isinstance(event, Delivered):
                self._settle(shared, 0)
            elif isinstance(event, TransferLost):
                self._give_up(shared, event.code, event.reason)
                self._settle(shared, 0)
            else:
                granted = self._local.slots(event.room)
                if granted is not None:
                    shared.granted = True
                    self._share(shared, granted)
                    self._grant(shared)
        events, self._events = self._events, []
        return events

    # ---- reports of the ranks

    def _take_reports(self) -> None:
        for rank, reader in enumerate(self._reports, 1):
            for frame in frames(reader):
                self._take(rank, reports.decode(frame))

    def _take(self, rank: int, report: SenderReport) -> None:
        shared = self._rooms.get(report.room)
        if shared is None or rank not in shared.sending:
            raise InternalError(f"rank {rank} reports {report}, which it does not have")
        if isinstance(report, RankGranted):
            shared.waiting.discard(rank)
            self._grant(shared)
        else:
            if not isinstance(report, RankDelivered):
                self._give_up(shared, report.code, report.reason)
            self._settle(shared, rank)

    def _grant(self, shared: _SharedPrompt) -> None:
        if shared.granted and not shared.waiting and shared.failure is None:
            self._events.append(SlotsGranted(shared.room))

    def _give_up(self, shared: _SharedPrompt, code: str, reason: str) -> None:
        """Note the first failure, and end the room on all ranks."""
        if shared.failure is None:
            shared.failure = code, reason
            shared.waiting.clear()
            self._local.cancel(shared.room, code, reason)
            if shared.sending - {0}:
                self._command_ranks(CancelRoom(shared.room, code, reason))

    def _settle(self, shared: _SharedPrompt, rank: int) -> None:
        shared.sending.discard(rank)
        if not shared.sending:
            del self._rooms[shared.room]
            failure = shared.failure
            self._events.append(
                Delivered(shared.room) if failure is None else TransferLost(shared.room, *failure)
            )

    # ---- commands to the ranks

    def _share(self, shared: _SharedPrompt, granted: GrantedSlots) -> None:
        """Tell the other ranks of a room that was granted to rank 0, unless they know it."""
        peer = self._local.peers.find(granted.incarnation)
        if shared.announced or shared.failure is not None or peer is None:
            return
        size = peer.hello.layout.tp_size
        if size not in self._others:
            ranks = range(size)
            spec, ours = self._layout.spec, self._layout.tp_size
            found = frozenset[int]().union(*(sources(spec, ours, rank, size) for rank in ranks))
            self._others[size] = found - {0}
        shared.announced = True
        if self._others[size]:
            shared.waiting.update(self._others[size])
            shared.sending.update(self._others[size])
            self._command_ranks(ExpectRoom(shared.room, shared.deadline, peer.leader, size, shared.pages))
