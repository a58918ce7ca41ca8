"""All receivers of a decode node with several ranks, in the place of one Receiver; used on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.errors import ChecksumFailed, InternalError, InvalidRequest, Overloaded, TransferFailed
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.counters import ReceiverCounters
from kv_transfer.cuts import sources
from kv_transfer.events import Arrived, PagesFree, PeerForgot, PeerRefused, ReceiverEvent, RoomFailed
from kv_transfer.inbound import Dial, LinkState
from kv_transfer.ranks.channel import AnnounceWork, FrameReader, FrameWriter, frames, send_message
from kv_transfer.ranks.group_heartbeats import GroupHeartbeats
from kv_transfer.ranks.receiver_messages import (
    AbortRoom,
    CloseRoom,
    ForgetPrefill,
    OpenRoom,
    RankArrived,
    RankForgotten,
    RankGaveUp,
    RankRefused,
    ReceiverReport,
    reports,
)
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_heartbeats import ReceiverHeartbeats


@dataclass(slots=True, eq=False)
class _SharedRoom:
    """One request on all ranks of the node."""

    room: int
    leader: str  # incarnation of the prefill node's rank 0
    pages: tuple[int, ...]
    held_pages: int
    deadline: float | None
    state_slot: int
    record_slots: int = 1  # that it takes on the rank where it takes most
    announced: bool = False  # the other ranks know it
    given_up: bool = False
    arrived: Arrived | None = None  # rank 0's
    receiving: set[int] = field(default_factory=lambda: {0})  # ranks on which it has not arrived
    holding: set[int] = field(default_factory=lambda: {0})  # ranks on which its pages may be written


class _ReceiverGroupHeartbeats(GroupHeartbeats):
    """The heartbeats of a decode node, whose rank 0 also names the rooms that wait for pages."""

    def __init__(self, local: ReceiverHeartbeats, command_ranks: Callable[[AnnounceWork], None]) -> None:
        super().__init__(local.announce, command_ranks)
        self._local = local

    def send_due(self, waiting: Iterable[tuple[str, int]]) -> None:
        self._local.send_due(waiting)


class ReceiverGroup:
    """Has the methods and events of a Receiver: a request has arrived, and its pages are free, on all ranks at once.

    Prefill nodes are named by the incarnation of their rank 0. The other ranks learn of a room when that rank 0 has
    named the addresses of its node; each of them connects to the prefill ranks that it needs.
    """

    def __init__(
        self,
        local: Receiver,
        layout: PoolLayout,
        record_slots: int,
        commands: FrameWriter,
        reports: Sequence[FrameReader],
    ) -> None:
        """Speak for the ranks of `layout`.

        Args:
            local: the receiver of rank 0.
            record_slots: record slots of every rank.
            commands: reaches all other ranks.
            reports: reports[i] comes from rank i + 1.
        """
        if len(reports) != layout.tp_size - 1:
            raise ValueError(f"{len(reports)} channels of reports for {layout.tp_size} ranks")
        self._local = local
        self._layout = layout
        self._record_slots = record_slots
        self._command_ranks = partial(send_message, commands)
        self._reports = reports
        self._rooms: dict[int, _SharedRoom] = {}
        self._unannounced: dict[int, _SharedRoom] = {}  # wait until their prefill node has named its ranks
        self._slots_by_size: dict[int, int] = {}  # ranks of a prefill node -> record slots of a room from it
        self._greeted: set[str] = set()  # prefill nodes that do not count as dead; their links may be gone
        self._events: list[ReceiverEvent] = []
        self.heartbeats = _ReceiverGroupHeartbeats(local.heartbeats, self._command_ranks)

    @property
    def counters(self) -> ReceiverCounters:
        """Rank 0's own counters, with the checksum failures of all ranks."""
        return self._local.counters

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when another rank has reported something."""
        return [reader.fileno() for reader in self._reports]

    @property
    def active(self) -> int:
        return len(self._rooms)

    @property
    def quarantined_pages(self) -> int:
        """Pages of rooms that were given up and may still be written on some rank."""
        return sum(len(room.pages) for room in self._rooms.values() if room.given_up)

    # ---- called by the decode node

    def connect(
        self, peer_incarnation: str, send: Callable[[bytes], object], dial: Dial | None = None
    ) -> None:
        self._local.connect(peer_incarnation, send, dial)
        self._greeted.add(peer_incarnation)

    def dial_ranks(self, incarnation: str) -> None:
        self._local.dial_ranks(incarnation)

    def handle(self, peer_incarnation: str, message: bytes) -> None:
        self._local.handle(peer_incarnation, message)

    def link_lost(self, incarnation: str) -> None:
        self._local.link_lost(incarnation)

    def link_works(self, incarnation: str) -> None:
        self._local.link_works(incarnation)

    def peer_lost(self, incarnation: str) -> None:
        """Treat a prefill rank as dead; with its rank 0 the whole node counts as dead, on all ranks of this node.

        Each rank of this node notices by itself what becomes of the other ranks of a prefill node, and may have
        connected to one again by the time its report of a loss is read.
        """
        self._local.peer_lost(incarnation)
        if incarnation in self._greeted:
            self._greeted.discard(incarnation)
            self._command_ranks(ForgetPrefill(incarnation))

    def shutdown(self) -> None:
        """Withdraw rank 0's memory; the other ranks do so when they end."""
        self._local.shutdown()

    def open(
        self,
        room: int,
        peers: Sequence[str],
        pages: Sequence[int],
        held_pages: int,
        deadline: float | None = None,
        state_slot: int = 0,
    ) -> int:
        """Open the room on all ranks as `Receiver.open` does, and return the generation on rank 0.

        `peers` names only rank 0 of the prefill node.
        """
        if room in self._rooms:
            raise InvalidRequest(f"room {room} is active already", param="room")
        (leader,) = peers
        taken = sum(each.record_slots for each in self._rooms.values())
        shared = _SharedRoom(room, leader, tuple(pages), held_pages, deadline, state_slot)
        shared.record_slots = self._slots_of(leader)
        if taken + shared.record_slots > self._record_slots:
            raise Overloaded(f"all {self._record_slots} record slots are in use")
        generation = self._local.open(room, peers, pages, held_pages, deadline, state_slot)
        self._rooms[room] = self._unannounced[room] = shared
        self._share()
        return generation

    def abort(self, room: int, reason: str) -> None:
        """Give the room up on all ranks, as `Receiver.abort` does."""
        shared = self._rooms.get(room)
        if shared is not None and not shared.given_up:
            self._events = [e for e in self._events if not (isinstance(e, Arrived) and e.room == room)]
            self._give_up(shared, TransferFailed.code, reason)

    def close(self, room: int) -> None:
        """End a room after Arrived was processed, on all ranks. Unknown rooms are ignored."""
        shared = self._rooms.get(room)
        if shared is None:
            return
        if shared.receiving:
            raise InternalError(f"room {room} closed before it arrived on ranks {sorted(shared.receiving)}")
        del self._rooms[room]
        self._local.close(room)
        self._command_ranks(CloseRoom(room))

    def poll(self) -> list[ReceiverEvent]:
        """Check every deadline of rank 0 and take the reports of the others; return the events of all since then."""
        for rank, reader in enumerate(self._reports, 1):
            for frame in frames(reader):
                self._take(rank, reports.decode(frame))
        for event in self._local.poll():
            self._take_own(event)
        self._share()
        events, self._events = self._events, []
        return events

    # ---- reports of the ranks

    def _take_own(self, event: ReceiverEvent) -> None:
        if isinstance(event, PeerRefused | PeerForgot):
            self._events.append(event)
        elif isinstance(event, Arrived):
            shared = self._rooms[event.room]
            shared.arrived = event
            self._arrived(shared, 0)
        elif isinstance(event, RoomFailed):
            self._fail(self._rooms[event.room], event.code, event.reason)
        else:
            self._freed(self._rooms[event.room], 0)

    def _take(self, rank: int, report: ReceiverReport) -> None:
        if isinstance(report, RankForgotten):
            self._events.append(PeerForgot(report.incarnation))
            return
        if isinstance(report, RankRefused):
            reason = f"rank {rank} of this node: {report.reason}"
            self._events.append(PeerRefused(report.incarnation, reason))
            return
        shared = self._rooms.get(report.room)
        if shared is None or rank not in shared.holding:
            raise InternalError(f"rank {rank} reports {report}, which it does not have")
        if isinstance(report, RankArrived):
            self._arrived(shared, rank)
        elif isinstance(report, RankGaveUp):
            self.counters.checksum_failures += report.code == ChecksumFailed.code
            self._fail(shared, report.code, report.reason)
        else:
            self._freed(shared, rank)

    def _arrived(self, shared: _SharedRoom, rank: int) -> None:
        shared.receiving.discard(rank)
        if not shared.receiving and not shared.given_up:
            assert shared.arrived is not None
            self._events.append(shared.arrived)

    def _fail(self, shared: _SharedRoom, code: str, reason: str) -> None:
        if not shared.given_up:
            self._events.append(RoomFailed(shared.room, code, reason))
            self._give_up(shared, code, reason)

    def _give_up(self, shared: _SharedRoom, code: str, reason: str) -> None:
        shared.given_up = True
        self._unannounced.pop(shared.room, None)
        self._local.abort(shared.room, reason, code)
        if shared.announced:
            self._command_ranks(AbortRoom(shared.room, code, reason))

    def _freed(self, shared: _SharedRoom, rank: int) -> None:
        shared.holding.discard(rank)
        if not shared.holding:
            del self._rooms[shared.room]
            self._events.append(PagesFree(shared.room, shared.pages))

    # ---- commands to the ranks

    def _share(self) -> None:
        """Tell the other ranks of rooms whose prefill node has named its ranks."""
        for shared in list(self._unannounced.values()):
            link = self._local.links.get(shared.leader)
            if link is None or link.state is not LinkState.READY:
                continue  # if it is lost, an event of rank 0 ends the room
            shared.record_slots = self._slots_of(shared.leader)
            del self._unannounced[shared.room]
            if sum(each.record_slots for each in self._rooms.values()) > self._record_slots:
                self._fail(shared, Overloaded.code, f"all {self._record_slots} record slots are in use")
            elif len(link.addresses) != link.ranks[1]:
                reason = f"prefill node {link.node} does not name the addresses of its ranks; update it"
                self._fail(shared, TransferFailed.code, reason)
            else:
                self._tell_of(shared, link.node, link.addresses)

    def _tell_of(self, shared: _SharedRoom, prefill: str, addresses: tuple[str, ...]) -> None:
        others = range(1, self._layout.tp_size)
        shared.announced = True
        shared.receiving.update(others)
        shared.holding.update(others)
        self._command_ranks(
            OpenRoom(
                room=shared.room,
                pages=shared.pages,
                held_pages=shared.held_pages,
                deadline=shared.deadline,
                state_slot=shared.state_slot,
                prefill=prefill,
                leader=shared.leader,
                addresses=addresses,
            )
        )

    def _slots_of(self, leader: str) -> int:
        """Return the record slots that a room from this prefill node takes on the rank where it takes most."""
        link = self._local.links.get(leader)
        size = 1 if link is None else link.ranks[1]
        found = self._slots_by_size.get(size)
        if found is None:
            spec, ours = self._layout.spec, self._layout.tp_size
            found = max(len(sources(spec, size, rank, ours)) for rank in range(ours))
            self._slots_by_size[size] = found
        return found
