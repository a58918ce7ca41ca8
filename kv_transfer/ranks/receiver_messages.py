"""The messages between rank 0 of a decode node and its other ranks, about what they receive."""

from __future__ import annotations

import msgspec

from common.messages.wire import InboxCodec
from kv_transfer.ranks.channel import AnnounceWork


class OpenRoom(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """rank 0 -> ranks: let the prefill ranks write a request; the arguments of `Receiver.open`, equal on all ranks."""

    room: int
    pages: tuple[int, ...]
    held_pages: int
    deadline: float | None  # on the clock of the host
    state_slot: int
    prefill: str  # name of the prefill node
    leader: str  # incarnation of its rank 0
    addresses: tuple[str, ...]  # of the peer sockets of its ranks


class CloseRoom(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: the request has arrived on all ranks and belongs to the node now."""

    room: int


class AbortRoom(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: give the request up. RankFreed follows."""

    room: int
    code: str
    reason: str


class ForgetPrefill(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: the prefill node with this rank 0 counts as lost."""

    leader: str


class RankArrived(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: all parts of this rank have arrived and are verified."""

    room: int


class RankGaveUp(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: the request failed on this rank. RankFreed follows."""

    room: int
    code: str
    reason: str


class RankFreed(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: no write can reach the pages of this rank any longer. The last report about a request."""

    room: int


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: this prefill rank cannot be used by this rank."""

    incarnation: str
    reason: str


class RankForgotten(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: this prefill rank was told that this node is lost; the rank greets it again."""

    incarnation: str


ReceiverCommand = OpenRoom | CloseRoom | AbortRoom | ForgetPrefill | AnnounceWork
ReceiverReport = RankArrived | RankGaveUp | RankFreed | RankRefused | RankForgotten

commands: InboxCodec[ReceiverCommand] = InboxCodec(ReceiverCommand, "commands of a decode node's rank 0")
reports: InboxCodec[ReceiverReport] = InboxCodec(ReceiverReport, "reports of a decode node's rank")
