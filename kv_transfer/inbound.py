"""The receiving side's state of one prefill rank, and of each room that receives from it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from common.errors import DeadlineExceeded, HandshakeRefused, RecordError, TransferFailed
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer import handoff_record
from kv_transfer.counters import ReceiverCounters
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import AbortTransfer, PagesWritten, RecordWritten, Slots, Welcome
from kv_transfer.page_check import PageCheck
from kv_transfer.pair_plan import Side, pair_plan
from kv_transfer.record_times import NO_TIMES, RecordTimes, record_times
from kv_transfer.state import ReceiveState, receive_step
from kv_transfer.transport.base import ReceiverEndpoint, Window

# Opens a connection to the rank of this incarnation at this address; returns what sends frames to it. Raises
# RequestError if that is not possible.
Dial = Callable[[str, str], Callable[[bytes], object]]
MAX_GREETING = 600.0  # seconds; the longest launch that a main loop announces


class LinkState(enum.Enum):
    GREETING = "greeting"  # Hello is sent
    READY = "ready"
    LOST = "lost"  # refused or given up; only acknowledgements are still processed


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one incarnation of a prefill node."""

    incarnation: str
    send: Callable[[bytes], object]
    greeted_at: float
    state: LinkState = LinkState.GREETING
    node: str = ""
    connected_at: float = 0.0  # when its process was last reported as connected
    busy_until: float = 0.0  # its loop may be silent until then
    ranks: tuple[int, int] = (0, 1)  # its tensor-parallel rank and size; set when READY
    side: Side | None = None  # the blocks that it writes here; set when READY
    dial: Dial | None = None  # connects to other ranks of its node
    addresses: tuple[str, ...] = ()  # of all ranks of its node, if it is rank 0; set when READY
    expected: tuple[int, int] | None = None  # the rank and size that rank 0 of its node claims for it

    def unanswered(self, now: float, timeout: float) -> bool:
        """Return whether Hello has waited too long: `timeout` if not connected, MAX_GREETING if connected."""
        connected = now - max(self.greeted_at, self.connected_at) < timeout
        greeting = self.state is LinkState.GREETING
        return greeting and (not connected or now - self.greeted_at >= MAX_GREETING)

    def welcomed(self, welcome: Welcome, layout: PoolLayout) -> None:
        """Mark the link READY to write into `layout`.

        Raises ValueError if planes do not divide among that many ranks, HandshakeRefused if it is another rank than
        the one that was dialed.
        """
        rank, size = welcome.tp_rank, welcome.tp_size
        if self.expected is not None and self.expected != (rank, size):
            wanted, of = self.expected
            raise HandshakeRefused(
                f"prefill node {welcome.node}: rank {rank} of {size} answers for rank {wanted} of {of}; "
                "restart that node"
            )
        theirs = msgspec.structs.replace(layout, tp_rank=rank, tp_size=size)
        self.ranks, self.side, self.addresses = (rank, size), pair_plan(theirs, layout).dst, welcome.addresses
        self.state, self.node = LinkState.READY, welcome.node


@dataclass(slots=True, eq=False)
class Inbound:
    """State and deadlines of one room and one prefill rank."""

    room: int
    generation: int
    link: Link
    pages: tuple[int, ...]  # destination of logical pages held_pages..
    held_pages: int
    record_slot: int
    deadline: float | None
    state: ReceiveState = ReceiveState.QUEUED
    next_page: int = 0  # logical; pages below it have landed or were held
    # Time of the latest progress or heartbeat; in quarantine, of the latest AbortTransfer.
    moved_at: float = 0.0
    state_slot: int = 0
    record: HandoffRecord | None = None  # set when it has arrived
    times: RecordTimes = NO_TIMES  # the record's
    check: PageCheck | None = None  # pages that are compared later than the record
    aborted_for: tuple[str, str] = ("", "")  # code, reason; repeated while quarantined

    @property
    def window(self) -> Window:
        return Window(
            self.generation, self.link.incarnation, frozenset(self.pages), self.record_slot, self.state_slot
        )

    @property
    def active(self) -> bool:
        """True while the node waits for it."""
        return self.state in (ReceiveState.QUEUED, ReceiveState.AWAITING, ReceiveState.RECEIVING)

    def go(self, state: ReceiveState) -> None:
        self.state = receive_step(self.room, self.state, state)

    def progress(self, message: PagesWritten, counters: ReceiverCounters, now: float) -> None:
        """Take note of pages that have landed."""
        end = message.first + message.count
        if end <= self.next_page or end > self.held_pages + len(self.pages):
            counters.duplicates += 1
            return
        if message.first > self.next_page:
            counters.gaps += 1  # a frame was lost; the checksums decide at the end
        self.next_page, self.moved_at = end, now
        self.go(ReceiveState.RECEIVING)

    def slots(self, now: float) -> Slots:
        """Return the message that lets the sender write."""
        left = None if self.deadline is None else max(0, int((self.deadline - now) * 1000))
        return Slots(
            self.room, self.generation, self.pages, self.record_slot, self.held_pages, left, self.state_slot
        )

    def abort(self) -> AbortTransfer:
        """Return the message that asks the sender to stop."""
        code, reason = self.aborted_for
        return AbortTransfer(self.room, self.generation, code[:64], reason[:4096])

    def overdue(self, now: float, limits: TransferLimits) -> tuple[str, str, str] | None:
        """Return (cause, code, reason) if the room has waited too long, else None.

        The wait begins at its latest progress, or at the end of the work that its sender has announced, if that is
        later.
        """
        if self.deadline is not None and now >= self.deadline:
            return "deadline", DeadlineExceeded.code, "the request's deadline passed before its KV arrived"
        waited = now - max(self.moved_at, self.link.busy_until)
        if self.state is ReceiveState.AWAITING and waited >= limits.first_page_timeout:
            reason = f"no page came from the prefill node within {limits.first_page_timeout:g} s"
            return "first_page", TransferFailed.code, reason
        if self.state is ReceiveState.RECEIVING and waited >= limits.stall_timeout:
            reason = f"the transfer made no progress for {limits.stall_timeout:g} s"
            return "stall", TransferFailed.code, reason
        return None

    def verify(
        self,
        endpoint: ReceiverEndpoint,
        message: RecordWritten,
        checksums: bool,
        later: Callable[[str], object] | None,
        now: float,
    ) -> None:
        """Take over the record that `message` announces.

        Raises RecordError unless it is complete; cause "checksum" if pages or state differ, "memory" if there is none
        to compare them. With `later`, which counts failures, the device may still be comparing them when this returns,
        and `check` is set.
        """
        self.times = record_times(message.sent_at, now)
        data = endpoint.record(self.record_slot)[: message.length]
        record = handoff_record.decode(data, self.room, self.generation)
        if checksums:
            self._check_sums(endpoint, record, later)
        self.record = record

    def _check_sums(
        self, endpoint: ReceiverEndpoint, record: HandoffRecord, later: Callable[[str], object] | None
    ) -> None:
        side = self.link.side
        assert side is not None
        expected = handoff_record.unpack_checksums(record.checksums)
        if len(expected) != len(self.pages) + bool(side.state):
            raise RecordError(
                "pages",
                f"record of room {self.room} has {len(expected)} checksums of {len(self.pages)} pages; "
                "set the same verify_checksums on both nodes",
            )
        compare = partial(self._compare, expected)
        try:
            started = None if later is None else endpoint.start_digests(side, self.pages, self.state_slot)
        except MemoryError as error:
            raise RecordError("memory", f"room {self.room} cannot be verified: {error}") from error
        if started is not None and later is not None:
            self.check = PageCheck(*started, compare, later)
            return
        found = endpoint.page_digests(side, self.pages)
        if side.state:
            found.append(endpoint.state_digest(side, self.state_slot))
        compare(found)

    def _compare(self, expected: Sequence[int], found: Sequence[int]) -> None:
        for index, (want, got) in enumerate(zip(expected, found, strict=True)):
            if want != got:
                page = f"page {self.held_pages + index}" if index < len(self.pages) else "the state"
                raise RecordError("checksum", f"{page} of room {self.room} differs from what was sent")
