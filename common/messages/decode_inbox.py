"""What a decode node may be told by the router. (What prefill nodes tell it: kv_transfer.messages.ReceiverInbox.)"""

from __future__ import annotations

import msgspec

from common.messages.generation import CacheSalt, ImageSpans, SamplingParams, TokenIds
from common.messages.identity import NodeRef
from common.messages.node_inbox import Abort, Drain, HeartbeatAck, PeerLost, Registered, Rejected
from common.messages.router_inbox import Room
from common.messages.wire import InboxCodec


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Set pages aside for this request and tell the prefill node where they are."""

    room: Room
    request_id: str
    token_ids: TokenIds  # as in Prefill: for the prefix cache, and for the request's length
    emitted: int
    sampling: SamplingParams
    prefill: NodeRef
    deadline_ms: int  # remaining
    salt: CacheSalt = b""  # as in Prefill
    images: ImageSpans = ()  # for the prefix cache alone: a decode node never sees pixels


DecodeMessage = Registered | Rejected | HeartbeatAck | Abort | PeerLost | Drain | Reserve
codec: InboxCodec[DecodeMessage] = InboxCodec(DecodeMessage, "decode inbox")
