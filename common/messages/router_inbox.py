"""Messages from prefill and decode nodes to the router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.messages.generation import FINISH_LENGTH, FINISH_STOP, Count, OutputToken, PromptLogprob
from common.messages.identity import (
    MANY,
    MAX_ROOM,
    Finite,
    GraphReport,
    Label,
    NodeCounters,
    NodeLoad,
    NodeRef,
    NodeState,
    OtherRouters,
    RankReport,
    Text,
    Total,
    control_link_id,
)
from common.messages.protocol import UNVERSIONED
from common.messages.wire import InboxCodec

Room = Annotated[int, Meta(ge=1, le=MAX_ROOM)]
ConfigValue = str | int | float | bool | None
FinishReason = Annotated[str, Meta(pattern=rf"^({FINISH_STOP}|{FINISH_LENGTH})\Z")]
MAX_RUNS = 16_384  # per message; a node runs at most 4,096 requests at once
# Tokens per message: with all log-probabilities that a request may ask for, they take less than half of what a message
# may have.
MAX_RUN = 4_096
MAX_STATE_BYTES = 1 << 20  # hidden states per message
MAX_MESSAGE = 4_096  # characters of an error message
Stages = Annotated[dict[Label, Finite], MANY]  # stage name -> seconds since this node received the request


class Register(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message of an incarnation, repeated until it is acknowledged."""

    protocol_version: int = UNVERSIONED  # a decoder's default; see common/messages/protocol.py
    node: NodeRef
    link_secret: Label = ""  # see control_link_id
    host: Label
    pid: Count
    model_fingerprint: Label
    # Maximum tokens of one request on this node; the router takes the minimum over all nodes.
    max_model_len: Count
    page_size: Count
    total_pages: Count
    # For /server_info, where it must be representable as JSON.
    effective_config: Annotated[dict[Label, ConfigValue], MANY]
    graphs: Annotated[tuple[GraphReport, ...], MANY] = ()
    ranks: Annotated[tuple[RankReport, ...], MANY] = ()  # in their order

    def link_id(self, purpose: str = "") -> str:
        """Return the routing id of one of the node's sockets to the router: its control link, unless `purpose` is
        given.
        """
        return control_link_id(self.node.name, self.node.incarnation, self.link_secret, purpose)

    def owns_link(self, link: str) -> bool:
        """Return whether `link`, the last part of a routing id, is one of the node's: others do not know the secret."""
        secret = self.link_secret
        return not secret or link == secret or link.startswith(f"{secret}-")


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent by a thread of its own. `loop_age_ms` is the time since the node's main loop last completed a turn.

    `announced_ms`, counted from the same moment, is the time that the loop announced it may need: it hangs when its
    age exceeds that by `health.loop_timeout`.
    """

    incarnation: Label
    sequence: Total
    state: NodeState
    loop_age_ms: Total
    announced_ms: Total = 0
    as_of: Finite  # Unix seconds of the node's host when load and counters were taken
    load: NodeLoad
    counters: NodeCounters
    others: OtherRouters = OtherRouters()


class FirstToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent by a prefill node before the transfer is complete. With a finish_reason the request ends here."""

    room: Room
    token: OutputToken
    finish_reason: FinishReason | None
    cached_tokens: Count
    stages: Stages | None = None  # set with a finish_reason, because no PrefillDone follows


class PromptScores(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Log-probabilities of consecutive prompt tokens. The runs of a prompt are sent in order, before FirstToken."""

    room: Room
    start: Count  # index in the prompt of the first of them; a prompt's first token has none
    tokens: Annotated[list[PromptLogprob], Meta(max_length=MAX_RUN)]


class HiddenStates(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Hidden states of consecutive positions of one request, in order.

    A position's state precedes the token that was drawn from it: FirstToken or the run of Tokens with it.
    """

    room: Room
    start: Count  # the first position
    states: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]  # float32 rows, little-endian


class PrefillDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pages and record were handed over to the decode node: the prefill part is over and its pages are unlocked."""

    room: Room
    stages: Stages


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one request. `offset` counts from the attempt's first token, which has offset 0."""

    room: Room
    offset: Count
    tokens: Annotated[list[OutputToken], Meta(max_length=MAX_RUN)]
    finish_reason: FinishReason | None = None
    stages: Stages | None = None
    verified: bool = False  # the step has verified drafts
    # Set in the last run: tokens of the answer per step that verified drafts.
    accept_length: Finite | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Tokens of one decode step, in one message for the whole batch unless they are more than MAX_RUN."""

    runs: Annotated[list[TokenRun], Meta(max_length=MAX_RUNS)]

    @classmethod
    def of(cls, runs: Iterable[TokenRun]) -> Iterator[Tokens]:
        """Yield the messages with these runs, in order."""
        part, tokens = list[TokenRun](), 0
        for run in runs:
            if tokens + len(run.tokens) > MAX_RUN:
                yield cls(runs=part)
                part, tokens = [], 0
            part.append(run)
            tokens += len(run.tokens)
        if part:
            yield cls(runs=part)


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The node has given this room up; `code` is one of common.errors.BY_CODE.

    The node holds nothing of the room any longer except pages in quarantine.
    """

    room: Room
    code: Label
    message: Text
    param: Text | None = None  # the field of the client's request that caused it

    @classmethod
    def of(cls, room: int, error: RequestError) -> Failed:
        return cls(room=room, code=error.code, message=str(error)[:MAX_MESSAGE], param=error.param)


class ProfileEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to Profile: a file of the node's host, or why there is none.

    `busy`: another profile of this node was being recorded.
    """

    order: Label
    path: Text = ""
    file_bytes: Total = 0
    seconds: Finite = 0.0
    steps: Total = 0
    problem: Text = ""
    busy: bool = False


class ChangeAnswered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to ChangeRole, as soon as the main loop has read it: the change begins, or why it does not."""

    order: Label
    refusal: Text = ""


class Goodbye(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The node is drained and ends: the router forgets this incarnation."""

    incarnation: Label


RouterMessage = (
    Register
    | Heartbeat
    | PromptScores
    | HiddenStates
    | FirstToken
    | PrefillDone
    | Tokens
    | Failed
    | ProfileEnded
    | ChangeAnswered
    | Goodbye
)
codec: InboxCodec[RouterMessage] = InboxCodec(RouterMessage, "router inbox")
