"""The messages between rank 0 of a prefill node and its other ranks, about what they send."""

from __future__ import annotations

import msgspec

from common.messages.wire import InboxCodec
from kv_transfer.ranks.channel import AnnounceWork
from kv_transfer.send_order import SendOrder


class ExpectRoom(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: this decode node has granted pages to rank 0. RankGranted follows from each rank that sends."""

    room: int
    deadline: float | None  # on the clock of the host
    leader: str  # incarnation of the decode node's rank 0
    size: int  # ranks of the decode node
    pages: int  # of the prompt; 0: not known


class SendPages(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: send your part of these pages once plan `after` is complete on your device."""

    order: SendOrder


class CancelRoom(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: send nothing more of this request. RankLost follows, unless it was delivered."""

    room: int
    code: str
    reason: str


class ForgetDecode(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: the decode node with this rank 0 is gone."""

    leader: str


class RankGranted(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: all decode ranks that need a part of this rank have granted their pages."""

    room: int


class RankDelivered(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: the part of this rank is written and announced. The last report about a request."""

    room: int


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """rank -> rank 0: the part of this rank ended in any other way; nothing reads its pages. The last report."""

    room: int
    code: str
    reason: str


SenderCommand = ExpectRoom | SendPages | CancelRoom | ForgetDecode | AnnounceWork
SenderReport = RankGranted | RankDelivered | RankLost

commands: InboxCodec[SenderCommand] = InboxCodec(SenderCommand, "commands of a prefill node's rank 0")
reports: InboxCodec[SenderReport] = InboxCodec(SenderReport, "reports of a prefill node's rank")
