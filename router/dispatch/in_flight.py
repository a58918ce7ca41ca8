"""One request while the dispatcher works on it, over all its attempts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import field

from common.errors import ClientGone
from router.dispatch.attempt import Attempt
from router.dispatch.generation import GenerationRequest, TakeNow, take_nothing
from router.metrics.request_series import RequestFigures
from router.metrics.timeline import Timeline
from router.nodes.placed_prompt import NO_PROMPT, PlacedPrompt


class InFlight(msgspec.Struct, eq=False):
    """State shared by the attempts of a request."""

    request: GenerationRequest
    timeline: Timeline
    deadline: float  # on the event loop's clock
    task: asyncio.Task[Any] | None = None  # reads the answer
    delivered: array[int] = field(default_factory=lambda: array("i"))  # tokens that were sent to the client
    avoid: set[str] = field(default_factory=set)  # incarnations to blame for failed attempts
    cached_tokens: int = 0  # of the prompt, in the attempt with the first token
    attempts: int = 0
    queued: float | None = None  # on the event loop's clock: its first placement since its last failure
    suspect: bytes = b""  # fingerprint of the request, once a node crashed while it ran there
    shared_trial: bool = False  # the latest attempt ran in isolation together with other suspects
    attempt: Attempt | None = None  # the attempt that nodes are working on
    aborted: bool = False
    take_now: TakeNow = take_nothing  # the reader's, for tokens that need not wake its task
    prompt: PlacedPrompt = NO_PROMPT  # `tokens`, as placement sees them; set for each attempt

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens to prefill: the prompt and the answer so far. Not to be changed."""
        return [*self.request.token_ids, *self.delivered] if self.delivered else self.request.token_ids

    @property
    def num_tokens(self) -> int:
        """Return the length of `tokens`."""
        return len(self.request.token_ids) + len(self.delivered)

    def figures(self) -> RequestFigures:
        """Return its sizes once it is over."""
        request, delivered = self.request, len(self.delivered)
        return RequestFigures(
            len(request.token_ids),
            delivered,
            self.cached_tokens,
            request.sampling.max_tokens,
            request.share.choices if request.share.counted else 0,
            request.share.longest(delivered),
            request.sampling.temperature,
            request.sampling.top_p,
        )

    def abort(self) -> None:
        """End the request because its client asked for that; the answer so far stays."""
        if self.aborted:
            return
        self.aborted = True
        if self.attempt is not None:
            self.attempt.fail(_gone())
        elif self.task is not None:
            # Without an attempt, the task waits inside the dispatcher: for room, a node, or the next attempt.
            self.task.cancel()

    def check_aborted(self) -> None:
        """Raise ClientGone if `abort` was called: its attempt may have ended in another way at the same moment."""
        if self.aborted:
            raise _gone()

    def ended_by_abort(self, error: BaseException) -> bool:
        """Return whether `error` is the consequence of `abort` only: a client may also leave at the same moment."""
        if not self.aborted:
            return False
        if isinstance(error, asyncio.CancelledError):
            return self.task is not None and self.task.uncancel() == 0
        return True


def _gone() -> ClientGone:
    return ClientGone("the client aborted the request")
