"""What the router may be told by a prefill or decode node."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.errors import RequestError
from common.messages.generation import OutputToken
from common.messages.identity import MAX_ROOM, GraphReport, NodeCounters, NodeLoad, NodeRef, NodeState
from common.messages.wire import InboxCodec

Room = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROOM)]
ConfigValue = str | int | float | bool | None
Stages = dict[str, float]  # stage name -> seconds since this node received the request


class Register(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message of an incarnation, repeated until it is acknowledged."""

    node: NodeRef
    host: str
    pid: int
    model_fingerprint: str
    max_model_len: (
        int  # tokens that one request may have here in all; the router takes the least of all nodes
    )
    page_size: int
    total_pages: int
    effective_config: dict[str, ConfigValue]  # for /server_info, which has to be able to write it as JSON
    graphs: tuple[GraphReport, ...] = ()  # for /server_info


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent by a thread of its own. `loop_age_ms` is how long the node's main loop has not come round.

    `announced_ms`, counted from the same moment, is what the loop announced that it may need: it hangs when its age
    exceeds that by `health.loop_timeout`.
    """

    incarnation: str
    sequence: int
    state: NodeState
    loop_age_ms: int
    announced_ms: int = 0
    as_of: float  # Unix seconds of the node's host at which load and counters were so
    load: NodeLoad
    counters: NodeCounters


class FirstToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From a prefill node, before the transfer is complete. With a finish_reason the request ends here."""

    room: Room
    token: OutputToken
    finish_reason: str | None
    cached_tokens: int


class PrefillDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pages and record were handed to the decode node: the prefill leg is over and its pages are unlocked."""

    room: Room
    stages: Stages


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one request. `offset` counts from the attempt's first token, which is 0."""

    room: Room
    offset: int
    tokens: list[OutputToken]
    finish_reason: str | None = None
    stages: Stages | None = None
    accept_length: float | None = None  # with the last run: tokens per step that verified drafts


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All tokens of one decode step, one message for the whole batch."""

    runs: list[TokenRun]


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The node gave this room up; `code` is one of common.errors.BY_CODE. Nothing of it is held here any more
    except pages in quarantine."""

    room: Room
    code: str
    message: str
    param: str | None = None  # the field of the client's request that it is about

    @classmethod
    def of(cls, room: int, error: RequestError) -> Failed:
        return cls(room=room, code=error.code, message=str(error), param=error.param)


class Goodbye(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Drained and leaving: forget this incarnation."""

    incarnation: str


RouterMessage = Register | Heartbeat | FirstToken | PrefillDone | Tokens | Failed | Goodbye
codec: InboxCodec[RouterMessage] = InboxCodec(RouterMessage, "router inbox")
