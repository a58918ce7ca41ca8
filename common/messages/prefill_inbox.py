"""Messages from the router to a prefill node.

Images arrive on a socket of their own (image_inbox.py), messages of decode nodes are `ToSender` in
kv_transfer/messages.py.
"""

from __future__ import annotations

import msgspec

from common.messages.generation import CacheSalt, Count, ImageSpans, Priority, SamplingParams, TokenIds
from common.messages.node_inbox import AnyNodeMessage
from common.messages.router_inbox import Room
from common.messages.wire import InboxCodec


class Prefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks the node to compute these tokens, draw the next one, and hand both over to the decode node of the
    reservation.
    """

    room: Room
    request_id: str
    token_ids: TokenIds  # prompt, followed by tokens already emitted if the request was moved to this node
    emitted: int  # how many of token_ids are output; sampling.max_tokens counts from the original prompt
    sampling: SamplingParams
    decode: str  # incarnation of the decode node that holds the reservation
    deadline_ms: int  # remaining
    waited_ms: Count = 0  # in the queues of nodes that gave it back, which counts as if it had waited here
    salt: CacheSalt = b""  # cached pages are shared only within one salt
    images: ImageSpans = ()  # token_ids contains arbitrary tokens in their place
    priority: Priority = 0

    @property
    def peer(self) -> str:
        """The incarnation of the decode node."""
        return self.decode


PrefillMessage = AnyNodeMessage | Prefill
codec: InboxCodec[PrefillMessage] = InboxCodec(PrefillMessage, "prefill inbox")
