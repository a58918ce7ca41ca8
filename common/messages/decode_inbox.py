"""Messages from the router to a decode node. (Messages from prefill nodes: kv_transfer.messages.ToReceiver.)"""

from __future__ import annotations

import msgspec

from common.messages.generation import CacheSalt, Count, ImageSpans, Priority, SamplingParams, TokenIds
from common.messages.identity import NodeRef
from common.messages.node_inbox import AnyNodeMessage
from common.messages.router_inbox import Room
from common.messages.wire import InboxCodec


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks the node to reserve pages for this request and to send their ids to the prefill node."""

    room: Room
    request_id: str
    token_ids: TokenIds  # as in Prefill; for the prefix cache and the request's length
    emitted: int
    sampling: SamplingParams
    prefill: NodeRef
    deadline_ms: int  # remaining
    waited_ms: Count = 0  # in the queues of nodes that gave it back, which counts as if it had waited here
    salt: CacheSalt = b""  # as in Prefill
    images: ImageSpans = ()  # only for the prefix cache: a decode node never receives pixels
    priority: Priority = 0

    @property
    def peer(self) -> str:
        """The incarnation of the prefill node."""
        return self.prefill.incarnation


DecodeMessage = AnyNodeMessage | Reserve
codec: InboxCodec[DecodeMessage] = InboxCodec(DecodeMessage, "decode inbox")
