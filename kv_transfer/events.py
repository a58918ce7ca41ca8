"""What the two ends tell their node: values returned by `poll`."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff_record import HandoffRecord

# Sender -> prefill node


@dataclass(frozen=True, slots=True)
class SlotsGranted:
    """The decode node set pages aside: `Sender.slots(room)` tells how many it still needs."""

    room: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Everything is written and announced; the source pages may be unlocked."""

    room: int


@dataclass(frozen=True, slots=True)
class TransferLost:
    """The room ended in any other way; no write reads its source pages any more."""

    room: int
    code: str  # of common.errors, or what `cancel` was given
    reason: str


SenderEvent = SlotsGranted | Delivered | TransferLost

# Receiver -> decode node


@dataclass(frozen=True, slots=True)
class Arrived:
    """Pages and record are here and verified. The pages belong to the node now; `close` the room to go on."""

    room: int
    record: HandoffRecord


@dataclass(frozen=True, slots=True)
class Failed:
    """The room will not arrive. Exactly one PagesFree follows, perhaps later."""

    room: int
    code: str  # of common.errors, or what the prefill node gave
    reason: str


@dataclass(frozen=True, slots=True)
class PagesFree:
    """No write can hit these pages any more: the node may reuse them."""

    room: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """This prefill node cannot be used: its rooms failed. `connect` again only after something changed."""

    incarnation: str
    reason: str


ReceiverEvent = Arrived | Failed | PagesFree | PeerRefused
