"""Events that the two ends return to their node from `poll`."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.page_check import PageCheck
from kv_transfer.record_times import RecordTimes

# Sender -> prefill node


@dataclass(frozen=True, slots=True)
class SlotsGranted:
    """The decode node has reserved pages; `Sender.slots(room)` says how many pages it still needs."""

    room: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Everything is written and announced; the source pages may be unlocked."""

    room: int


@dataclass(frozen=True, slots=True)
class TransferLost:
    """The room ended in any other way; no write reads its source pages any longer."""

    room: int
    code: str  # an error code of common.errors, or the one passed to `cancel`
    reason: str


SenderEvent = SlotsGranted | Delivered | TransferLost

# Receiver -> decode node


@dataclass(frozen=True, slots=True)
class Arrived:
    """Pages and record have arrived. The node owns the pages now and must `close` the room.

    They are verified, except what `checks` compare: the device may read those pages, and write to them later, but no
    token that comes from them may leave the node, and no cache may keep them, before `checks` have found no failure.
    """

    room: int
    record: HandoffRecord
    times: RecordTimes
    checks: tuple[PageCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class RoomFailed:
    """The transfer of a room has failed. Exactly one PagesFree follows, possibly later."""

    room: int
    code: str  # an error code of common.errors, or the prefill node's
    reason: str


@dataclass(frozen=True, slots=True)
class PagesFree:
    """No write can reach these pages from now on, so the node may reuse them."""

    room: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """This prefill node cannot be used, and its rooms have failed. Call `connect` again only after a change."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerForgot:
    """This prefill node was told that this node is lost, and its rooms have failed. Call `connect` before `open`."""

    incarnation: str


ReceiverEvent = Arrived | RoomFailed | PagesFree | PeerRefused | PeerForgot
