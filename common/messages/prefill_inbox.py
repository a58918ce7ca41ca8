"""What a prefill node may be told by the router. (What decode nodes tell it: kv_transfer.messages.SenderInbox.)"""

from __future__ import annotations

import msgspec

from common.messages.generation import CacheSalt, ImageSpans, SamplingParams, TokenIds
from common.messages.node_inbox import Abort, Drain, HeartbeatAck, PeerLost, Registered, Rejected
from common.messages.router_inbox import Room
from common.messages.wire import InboxCodec


class Prefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute these tokens, draw the next one, hand both over to the decode node that reserved the room."""

    room: Room
    request_id: str
    token_ids: TokenIds  # prompt, followed by tokens already emitted if the request was moved here
    emitted: (
        int  # how many of token_ids are output already; sampling.max_tokens counts from the original prompt
    )
    sampling: SamplingParams
    decode: str  # incarnation of the decode node that holds the reservation
    deadline_ms: int  # remaining
    salt: CacheSalt = b""  # cached pages are shared within one salt only
    images: ImageSpans = ()  # any token of the vocabulary stands in token_ids there


PrefillMessage = Registered | Rejected | HeartbeatAck | Abort | PeerLost | Drain | Prefill
codec: InboxCodec[PrefillMessage] = InboxCodec(PrefillMessage, "prefill inbox")
