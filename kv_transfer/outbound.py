"""Sends one room's pages, state and record to one decode rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import msgspec

from common.errors import DeadlineExceeded, InternalError, RecordError, TransferFailed
from kv_transfer import handoff_record
from kv_transfer.counters import SenderCounters
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.handshake import Peer
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import AbortAck, PagesWritten, RecordWritten, SenderFailed, Slots, ToReceiver
from kv_transfer.record_times import sending_time
from kv_transfer.state import SendState, send_step
from kv_transfer.transport.base import PageList, PageWrite, SenderEndpoint, Ticket, WriteState


class WriteKind(Enum):
    """The part of a room that a write carries."""

    PAGES = "pages"
    STATE = "state"
    RECORD = "record"


@dataclass(slots=True, eq=False)
class PostedWrite:
    """A write that is not known to have settled."""

    kind: WriteKind
    first: int = 0  # logical page; used for PAGES, as is `count`
    count: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    nbytes: int = 0
    digests: Sequence[int] = ()  # to be read once the write has landed
    rest: Callable[[], PageWrite] | None = None  # writes the planes that were not sent layer by layer
    shared: bool = False  # tickets may cover other rooms of the same forward, too
    layered: bool = False  # some layers were sent while the forward was running
    launching: bool = False  # the forward is being launched: tickets of sent layers are still missing

    def add(self, write: PageWrite) -> None:
        self.tickets.append(write.ticket)
        self.nbytes, self.digests, self.rest = write.nbytes, write.digests, None


@dataclass(slots=True, eq=False)
class Outbound:
    """State of one room and one decode rank. `advance` returns the messages to send to that rank."""

    room: int
    endpoint: SenderEndpoint
    limits: TransferLimits
    counters: SenderCounters
    expected_at: float  # when its prompt arrived
    busy_until: float  # end of the work that the decode node has announced last
    deadline: float | None
    decode: str = ""  # incarnation that may grant; "" for any
    named_at: float = 0.0  # when a Queued has named it last
    state: SendState = SendState.EXPECTED
    peer: Peer | None = None
    slots: Slots | None = None
    next_page: int = 0  # logical; pages below it are posted or held by the decode node
    failure: tuple[str, str] | None = None  # code, reason
    abort_asked: bool = False
    bytes_written: int = 0  # that have landed
    moved_at: float = 0.0  # when bytes moved last, or when the oldest outstanding write was posted
    _given_up_at: float | None = None  # when it was first looked at after it had been given up
    _checksums: list[Sequence[int]] = field(default_factory=list)  # per write that has landed
    _posted: list[PostedWrite] = field(default_factory=list)
    _record: HandoffRecord | None = None
    _moved: int = -1  # latest value of endpoint.progress

    @property
    def waits_since(self) -> float:
        """Start of the wait for slots."""
        return max(self.expected_at, self.named_at, self.busy_until)

    @property
    def waits_until(self) -> float:
        """End of the wait for slots."""
        return self.waits_since + self.limits.slots_timeout

    @property
    def given_up(self) -> bool:
        """True if nothing more is sent. The room of several parts is lost only once all of them have settled."""
        return self.failure is not None

    @property
    def settled(self) -> bool:
        return not self._posted

    @property
    def busy(self) -> bool:
        """True if it has to be polled, because neither a message nor `alarm` announces its next step."""
        return bool(self._posted) or self.state in (
            SendState.FINISHING,
            SendState.RECORDING,
            SendState.DRAINING,
        )

    @property
    def alarm(self) -> float:
        """Time at which it has waited for too long, if nothing happens before."""
        until = float("inf") if self.deadline is None else self.deadline
        if self.state is SendState.EXPECTED:
            until = min(until, self.waits_until)
        return until

    @property
    def ended(self) -> bool:
        return self.state in (SendState.DELIVERED, SendState.LOST)

    def accepts(self, peer: Peer) -> bool:
        return self.decode in ("", peer.incarnation)

    def is_of(self, peer: Peer | None, generation: int) -> bool:
        """Return whether this peer granted slots of this generation."""
        return self.slots is not None and self.peer is peer and self.slots.generation == generation

    def grant(self, peer: Peer, slots: Slots, received_at: float) -> None:
        self._go(SendState.GRANTED)
        self.peer, self.slots, self.next_page = peer, slots, slots.held_pages
        if slots.deadline_ms is not None:
            until = received_at + slots.deadline_ms / 1000
            self.deadline = until if self.deadline is None else min(self.deadline, until)

    def send_pages(self, src_pages: Sequence[int], first: int, now: float) -> None:
        """Post logical pages first.. ; they must follow the previous ones without a gap."""
        pages = self._next(src_pages, first)
        if pages is None or self.peer is None:
            return
        write = self.endpoint.write_pages(
            self.peer.memory, self.peer.plan, pages, self.limits.verify_checksums
        )
        posted = PostedWrite(WriteKind.PAGES, first, len(src_pages))
        posted.add(write)
        self._post(posted, now)

    def follow(self, src_pages: Sequence[int], first: int, now: float) -> tuple[PageList, PostedWrite] | None:
        """Do as `send_pages` for pages that a forward has begun to write; the caller updates the returned PostedWrite.

        Returns None if there is nothing to send.
        """
        pages = self._next(src_pages, first)
        if pages is None:
            return None
        posted = PostedWrite(WriteKind.PAGES, first, len(src_pages), launching=True)
        self._post(posted, now)
        return pages, posted

    def complete(self, end: int, now: float) -> None:
        """Post what was not sent layer by layer: the forwards that wrote logical pages below `end` have ended."""
        if self.given_up:
            return
        for posted in self._posted:
            if posted.rest is not None and posted.first + posted.count <= end:
                posted.add(posted.rest())
                if posted is self._posted[0]:
                    self.moved_at = now

    def _next(self, src_pages: Sequence[int], first: int) -> PageList | None:
        """Count these pages as posted and return them; None if there are none or the room is lost."""
        if self.given_up:
            return None  # the event that announces the loss comes later, or has not been read yet
        slots, peer = self.slots, self.peer
        if self.state is not SendState.GRANTED or slots is None or peer is None:
            raise InternalError(
                f"room {self.room}: pages sent while {self.state.value}; wait for SlotsGranted"
            )
        if first != self.next_page:
            raise InternalError(f"room {self.room}: page {first} sent, {self.next_page} is next")
        offset = first - slots.held_pages
        dst_pages = slots.pages[offset : offset + len(src_pages)]
        if len(dst_pages) < len(src_pages):
            raise InternalError(
                f"room {self.room}: {first + len(src_pages)} pages sent, slots are for "
                f"{slots.held_pages + len(slots.pages)}"
            )
        if not src_pages:
            return None
        self.next_page += len(src_pages)
        return PageList(src_pages, dst_pages, slots.generation)

    def finish(self, record: HandoffRecord, state_slot: int, now: float) -> None:
        """Post the state, if there is any. The record follows all writes; every granted page must have been sent."""
        if self.given_up:
            return
        if self.slots is None or self.next_page != self.slots.held_pages + len(self.slots.pages):
            raise InternalError(f"room {self.room}: finished after page {self.next_page} of {self.slots}")
        if any(posted.rest is not None for posted in self._posted):
            raise InternalError(f"room {self.room}: finished before its forwards were complete")
        self._go(SendState.FINISHING)
        self._record = record
        self._post_state(state_slot, now)

    def _post_state(self, state_slot: int, now: float) -> None:
        assert self.peer is not None
        assert self.slots is not None
        plan = self.peer.plan
        if not plan.state:
            return
        if not 0 < state_slot < plan.src.layout.num_slots:
            raise InternalError(
                f"room {self.room}: state slot {state_slot} of {plan.src.layout.num_slots} cannot be sent"
            )
        posted = PostedWrite(WriteKind.STATE)
        posted.add(
            self.endpoint.write_state(
                self.peer.memory,
                plan,
                (state_slot, self.slots.state_slot),
                self.slots.generation,
                self.limits.verify_checksums,
            )
        )
        self._post(posted, now)

    def give_up(self, code: str, reason: str) -> None:
        """Post nothing more; outstanding writes drain. Idempotent: the first cause is kept."""
        if self.state is SendState.DRAINING or self.ended:
            return
        self._go(SendState.DRAINING)
        self.failure = (code, reason)
        for posted in self._posted:
            if not posted.shared:
                for ticket in posted.tickets:
                    self.endpoint.cancel(ticket)

    def advance(self, now: float) -> list[ToReceiver]:
        messages: list[ToReceiver] = []
        if self.ended:
            return messages
        self._reap(messages, now)
        if self.state is SendState.FINISHING and self.settled:
            self._post_record(now)
            self._reap(messages, now)
        if self.state is not SendState.DRAINING and not self.ended:
            self._check_time(now)
        if self.state is SendState.DRAINING:
            self._settle(messages, now)
        return messages

    def _reap(self, messages: list[ToReceiver], now: float) -> None:
        """Announce landed writes in order; a failed write makes the room drain."""
        while self._posted and self.state is not SendState.DRAINING:
            head = self._posted[0]
            outcome = WriteState.PENDING if head.rest is not None else self._outcome(head)
            if outcome is WriteState.PENDING:
                return
            self._posted.pop(0)
            if outcome is WriteState.FAILED:
                cause = self.endpoint.last_error(self.peer.memory) if self.peer is not None else ""
                self.give_up(
                    TransferFailed.code, f"a write to the decode node failed ({cause or 'no reason known'})"
                )
                return
            self.moved_at = now
            self.counters.bytes_written += head.nbytes
            self.bytes_written += head.nbytes
            messages.extend(self._landed(head))

    def _landed(self, write: PostedWrite) -> list[ToReceiver]:
        assert self.slots is not None
        if write.kind is WriteKind.RECORD:
            self._go(SendState.DELIVERED)
            return [RecordWritten(self.room, self.slots.generation, write.nbytes, sending_time())]
        self._checksums.append(write.digests)
        if write.kind is WriteKind.STATE:  # the record announces it
            return []
        self.counters.pages_written += write.count
        self.counters.pages_by_layer += write.count if write.layered else 0
        return [PagesWritten(self.room, self.slots.generation, write.first, write.count)]

    def _post_record(self, now: float) -> None:
        assert self.slots is not None
        assert self.peer is not None
        assert self._record is not None
        slot_bytes = self.peer.hello.record_bytes
        packed = handoff_record.pack_checksums(list(chain.from_iterable(self._checksums)))
        record = msgspec.structs.replace(self._record, checksums=packed)
        try:
            data = handoff_record.encode(record, self.room, self.slots.generation, slot_bytes)
        except RecordError as error:
            self.give_up(InternalError.code, str(error))
            return
        self._go(SendState.RECORDING)
        offset = self.slots.record_slot * slot_bytes
        ticket = self.endpoint.write_record(self.peer.memory, offset, data, self.slots.generation)
        self._post(PostedWrite(WriteKind.RECORD, tickets=[ticket], nbytes=len(data)), now)

    def _outcome(self, write: PostedWrite) -> WriteState:
        states = {self.endpoint.poll(ticket) for ticket in write.tickets}
        if WriteState.PENDING in states or write.launching:
            return WriteState.PENDING
        return WriteState.FAILED if WriteState.FAILED in states else WriteState.DONE

    def _post(self, write: PostedWrite, now: float) -> None:
        if not self._posted:
            self.moved_at = now
        self._posted.append(write)

    def _check_time(self, now: float) -> None:
        if self.deadline is not None and now >= self.deadline:
            self.give_up(DeadlineExceeded.code, "the request's deadline passed before its KV was handed over")
        elif self.state is SendState.EXPECTED and now >= self.waits_until:
            self.counters.ungranted += 1
            self.give_up(
                TransferFailed.code,
                f"the decode node granted no slots within {self.limits.slots_timeout:g} s",
            )
        elif self._posted and self._posted[0].rest is None and self.peer is not None:
            moved = self.endpoint.progress(self.peer.memory)
            if moved != self._moved:
                self._moved, self.moved_at = moved, now
            elif now - self.moved_at >= self.limits.stall_timeout:
                self.counters.stalled += 1
                self.give_up(
                    TransferFailed.code,
                    f"no byte reached the decode node for {self.limits.stall_timeout:g} s",
                )

    def _settle(self, messages: list[ToReceiver], now: float) -> None:
        """Send the final message once no write is outstanding.

        Writes that are outstanding for stall_timeout more are abandoned, if the transport can: then the room ends here,
        and the decode node, which asks again and again, gets its answer when they have ended. Otherwise a write that
        never settles leaves the room poisoned.
        """
        if self._given_up_at is None:
            self._given_up_at = now
        late = now - self._given_up_at >= self.limits.stall_timeout
        for posted in self._posted:
            if late and not posted.shared:
                for ticket in posted.tickets:
                    self.endpoint.abandon(ticket)
        self._posted = [each for each in self._posted if self._outcome(each) is WriteState.PENDING]
        if self._posted:
            return
        self._go(SendState.LOST)
        if self.slots is None or self.peer is None or self.failure is None:
            return
        if not self.endpoint.writes_ended(self.peer.incarnation, self.slots.generation):
            return
        if self.abort_asked:
            messages.append(AbortAck(self.room, self.slots.generation))
        else:
            messages.append(
                SenderFailed(self.room, self.slots.generation, self.failure[0], self.failure[1][:4096])
            )

    def _go(self, state: SendState) -> None:
        self.state = send_step(self.room, self.state, state)
