"""The interface between the HTTP side and the dispatcher: token ids in, a stream of tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.messages.generation import ImageSpan, OutputToken, PromptLogprob, SamplingParams
from router.dispatch.answer_states import AnswerStates
from router.dispatch.shared_prompt import UNSHARED, PromptShare
from router.dispatch.verified_steps import VerifiedSteps
from router.metrics.trace_context import TraceContext

FINISH_ABORT = "abort"  # finish reason of a request that /abort_request has ended


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image and its position in the prompt."""

    span: ImageSpan
    data: bytes


class PromptBatch(msgspec.Struct):
    """State shared by all prompts of one HTTP request: if one of them fails, the others end with it."""

    failed: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, eq=False):
    """One validated prompt."""

    request_id: str
    # An array if the router made the request: a garbage collection visits every item of a list, and each item of an
    # array takes a tenth of the memory.
    token_ids: Sequence[int]
    sampling: SamplingParams
    streamed: bool = False  # its client gets tokens as they arrive
    images: tuple[PromptImage, ...] = ()
    client: str = ""  # API key id, or the client's address where the cluster has no keys
    weight: int = 1  # the client's share while clients wait for room
    priority: int = 0  # lower goes first in every queue
    salt: bytes = b""  # cached pages are shared only between requests with the same salt
    session: bytes = b""  # names the conversation, whose requests go to the same nodes; b"": none
    batch: PromptBatch = msgspec.field(default_factory=PromptBatch)
    share: PromptShare = UNSHARED  # with other choices of the same prompt, which is computed once
    arrived: float | None = None  # monotonic seconds at which its HTTP request arrived
    trace: TraceContext | None = None  # None: not traced
    states: AnswerStates | None = None  # collects the hidden states; None: the client asks for none
    steps: VerifiedSteps = msgspec.field(default_factory=VerifiedSteps)  # collects those that verified drafts
    # Other ids under which its client may abort it: those of its prompt and of the HTTP request.
    known_as: tuple[str, ...] = ()


class TokenDelta(msgspec.Struct):
    """Tokens that arrived together."""

    tokens: list[OutputToken]
    finish_reason: str | None  # set on the last delta
    cached_tokens: int | None  # set on the first delta: prompt tokens found in the prefill node's cache
    prompt_logprobs: Sequence[PromptLogprob] = ()  # in the first delta, from the prompt's second token on


class AnswerComplete(Exception):
    """Thrown into a generator by its reader when the text is complete, for example at a stop string."""


# Takes tokens in the turn of the event loop in which they arrive, so that the reader's task need not run. Returns False
# if it cannot take them now; then the generator yields them. It never raises.
TakeNow = Callable[[Sequence[OutputToken]], bool]


def take_nothing(tokens: Sequence[OutputToken]) -> bool:
    """Return False: a reader that takes nothing itself gets every token from the generator."""
    return False


class Generator(Protocol):
    """Generates the answer to a request. Raises RequestError.

    Closing the generator means that the client has disconnected or that the request's batch has failed;
    `athrow(AnswerComplete())` means that the answer is complete. Either way both nodes are freed.
    """

    def generate(
        self, request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the answer. After the first delta, tokens may go to `take_now` instead.

        It is called only while the reader waits for the next delta, and never with the last tokens.
        """
        ...
