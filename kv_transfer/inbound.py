"""One room, and one prefill node, as the receiving side sees them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import DeadlineExceeded, RecordError, TransferFailed
from kv_transfer import handoff_record
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import Slots
from kv_transfer.state import ReceiveState, receive_step
from kv_transfer.transport.base import ReceiverEndpoint, Window


class LinkState(enum.Enum):
    GREETING = "greeting"  # Hello is said
    READY = "ready"
    LOST = "lost"  # refused, or given up; listened to for acknowledgements only


@dataclass(slots=True, eq=False)
class Link:
    """The way to one incarnation of a prefill node."""

    incarnation: str
    send: Callable[[bytes], object]
    greeted_at: float
    state: LinkState = LinkState.GREETING
    node: str = ""
    busy_until: float = 0.0  # its loop may be silent so long


@dataclass(slots=True, eq=False)
class Inbound:
    """State of one room and the clockwork of its deadlines."""

    room: int
    generation: int
    link: Link
    pages: tuple[int, ...]  # destination of logical pages held_pages..
    held_pages: int
    record_slot: int
    deadline: float | None
    state: ReceiveState = ReceiveState.QUEUED
    next_page: int = 0  # logical; those below have landed or were held
    moved_at: float = 0.0  # of the latest progress or sign of life, or of the latest Abort in quarantine
    aborted_for: tuple[str, str] = ("", "")  # code, reason: said again while quarantined

    @property
    def window(self) -> Window:
        return Window(self.generation, self.link.incarnation, frozenset(self.pages), self.record_slot)

    @property
    def active(self) -> bool:
        """The node still waits for it."""
        return self.state in (ReceiveState.QUEUED, ReceiveState.AWAITING, ReceiveState.RECEIVING)

    def go(self, state: ReceiveState) -> None:
        self.state = receive_step(self.room, self.state, state)

    def slots(self, now: float) -> Slots:
        """The message that lets the sender write."""
        left = None if self.deadline is None else max(0, int((self.deadline - now) * 1000))
        return Slots(self.room, self.generation, self.pages, self.record_slot, self.held_pages, left)

    def overdue(self, now: float, limits: TransferLimits) -> tuple[str, str, str] | None:
        """(cause, code, reason) once the room has waited too long; measured by progress, not in total."""
        if self.deadline is not None and now >= self.deadline:
            return "deadline", DeadlineExceeded.code, "the request's deadline passed before its KV arrived"
        waited = now - self.moved_at
        if self.state is ReceiveState.AWAITING and waited >= limits.first_page_timeout:
            reason = f"no page came from the prefill node within {limits.first_page_timeout:g} s"
            return "first_page", TransferFailed.code, reason
        if self.state is ReceiveState.RECEIVING and waited >= limits.stall_timeout:
            reason = f"the transfer made no progress for {limits.stall_timeout:g} s"
            return "stall", TransferFailed.code, reason
        return None

    def verified_record(self, endpoint: ReceiverEndpoint, length: int, checksums: bool) -> HandoffRecord:
        """The record, if it and the pages are whole. Raises RecordError; cause "checksum" is about pages."""
        data = endpoint.record(self.record_slot)[:length]
        record = handoff_record.decode(data, self.room, self.generation)
        if not checksums:
            return record
        expected = handoff_record.unpack_checksums(record.page_checksums)
        if len(expected) != len(self.pages):
            raise RecordError(
                "pages",
                f"record of room {self.room} has checksums of {len(expected)} pages of {len(self.pages)}; "
                "set the same verify_checksums on both nodes",
            )
        for index, (want, got) in enumerate(zip(expected, endpoint.digests(self.pages), strict=True)):
            if want != got:
                page = self.held_pages + index
                raise RecordError("checksum", f"page {page} of room {self.room} differs from what was sent")
        return record
