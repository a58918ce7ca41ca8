"""One attempt of one request on a pair of nodes: merges the token streams of both nodes by offset."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import field

from common.errors import DeadlineExceeded, InternalError, NodeLost, RequestError
from common.messages.generation import OutputToken, PromptLogprob
from common.messages.router_inbox import FirstToken, HiddenStates, PromptScores, TokenRun
from router.dispatch.answer_states import AnswerStates
from router.dispatch.first_token_hold import FirstTokenHold
from router.dispatch.generation import TakeNow, TokenDelta
from router.dispatch.limits import TOO_LONG
from router.dispatch.verified_steps import VerifiedSteps
from router.nodes.history import NOTHING_CACHED, ExpectedCache
from router.nodes.registry import Node

MAX_EARLY_RUNS = 4096  # token runs of a decode node that may arrive before the first token
# Tokens that go to the client in one turn of the event loop. With log-probabilities a token costs 27 us.
MAX_TAKEN = 128
# Tokens of one run that may go to the client in the turn in which they arrive: a hundred runs share that turn.
MAX_DIRECT = 16


class Wakeup(msgspec.Struct, eq=False):
    """An event for a single waiter. `asyncio.Event`, which has many, costs several times as much."""

    is_set: bool = False
    waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    def future(self) -> asyncio.Future[None]:
        """Return what is done at the next `set`. Await it only while `is_set` is False."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter


class Attempt(msgspec.Struct, eq=False):
    """The state of one attempt. The control plane fills it, the dispatcher empties it; both run on the event loop."""

    room: int
    prefill: Node
    decode: Node
    emitted: int = 0  # tokens of the answer from earlier attempts
    next_offset: int = 0
    pending: list[OutputToken] = field(default_factory=list)  # in order, not sent to the client yet
    # offset -> run that arrived before the runs that precede it
    early: dict[int, TokenRun] = field(default_factory=dict)
    finish_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    expected: ExpectedCache = NOTHING_CACHED  # what its nodes were believed to hold of the prompt
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    states: AnswerStates | None = None  # collects the hidden states that the client asks for
    steps: VerifiedSteps = field(default_factory=VerifiedSteps)  # collects the steps that verified drafts
    prefill_over: bool = False  # the pages are handed over or the prefill failed: no abort is needed there
    decode_over: bool = False
    transferred: bool = False  # the prefill node has handed over the pages
    blamed: set[str] = field(default_factory=set)  # incarnations that the next attempt should avoid
    # The node to which its messages cannot be sent, or the exception of one that cannot be encoded.
    unreached: Node | Exception | None = None
    deadline: asyncio.TimerHandle | None = None
    woken: Wakeup = field(default_factory=Wakeup)
    # Takes the tokens of a run at once; None unless the reader's task waits and has nothing to do.
    direct: TakeNow | None = None
    # Delays the wake-up for the first token; None once the reader was woken, and where nothing delays it.
    hold: FirstTokenHold | None = None

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer so far over all attempts, including those in `pending`."""
        return self.emitted + self.next_offset

    def on_prompt_scores(self, message: PromptScores) -> None:
        """Add log-probabilities of the prompt, which arrive in order before the first token."""
        if message.start != len(self.prompt_logprobs) + 1:
            self.fail(InternalError("the prefill node left out log-probabilities of the prompt"))
        elif self.finish_reason is None:
            self.prompt_logprobs += message.tokens

    def on_states(self, message: HiddenStates, incarnation: str) -> None:
        """Add hidden states from one of the nodes, the one with this incarnation."""
        if self.states is None or self.error is not None:
            return
        try:
            if incarnation == self.decode.incarnation:
                self.states.add_decoded(message.start, message.states)
            elif incarnation == self.prefill.incarnation:
                self.states.add_prefilled(message.start, message.states)
        except InternalError as error:
            self.fail(error)

    def delta(self, tokens: list[OutputToken], done: str | None, first: bool) -> TokenDelta:
        """Return what the reader gets. `first`: nothing was yielded before, in this attempt or an earlier one."""
        if first:
            return TokenDelta(tokens, done, self.cached_tokens, self.prompt_logprobs)
        return TokenDelta(tokens, done, None)

    def on_first_token(self, message: FirstToken) -> None:
        self.cached_tokens = message.cached_tokens
        run = TokenRun(self.room, 0, [message.token], message.finish_reason)
        if self.hold is None or self.next_offset or self.early or run.finish_reason is not None:
            self.on_run(run)
        else:
            self._append(run)
            self.hold.begin(self._wake)

    def on_run(self, run: TokenRun) -> None:
        """Add tokens from either node. Duplicates are dropped; a run that arrives early waits in `early`."""
        if self.finish_reason is not None:
            return
        if run.offset > self.next_offset:
            if len(self.early) >= MAX_EARLY_RUNS:
                self.fail(
                    InternalError(
                        "the decode node sent too many tokens before the prefill node sent the first one"
                    )
                )
            else:
                self.early[run.offset] = run
            return
        if (
            self.direct is not None
            and not self.early
            and run.finish_reason is None
            and run.offset == self.next_offset
            and len(run.tokens) <= MAX_DIRECT
            and self.direct(run.tokens)
        ):
            if run.verified:
                self.steps.add(self.emitted + run.offset, len(run.tokens))
            return
        self._append(run)
        if self.early:
            for offset in sorted(self.early):
                if self.finish_reason is not None or offset > self.next_offset:
                    break
                self._append(self.early.pop(offset))
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the attempt with `error`, unless it has already failed or finished."""
        if self.error is None and self.finish_reason is None:
            self.error = error
        self._wake()

    def not_sent(self, reason: Node | Exception) -> None:
        """Note that not all of its messages were sent."""
        self.unreached = reason
        if not isinstance(reason, Exception):
            # The message to the decode node is sent first, so only that node can hold state of this attempt.
            self.prefill_over, self.decode_over = True, self.decode_over or reason is self.decode
        self._wake()

    def lose(self, node: Node, reason: str) -> None:
        """End the attempt because one of its nodes is lost."""
        if node is self.prefill:
            self.prefill_over = True
        else:
            self.decode_over = True
        self.fail(NodeLost(f"{node.role} node {node.name} was lost: {reason}"))

    def expire(self) -> None:
        """End the attempt at the deadline of the request. One timer per attempt: one per token would cost too much."""
        self.fail(DeadlineExceeded(TOO_LONG))

    def take(self) -> list[OutputToken]:
        """Return up to MAX_TAKEN of the tokens that have arrived since the last call; the rest stays in `pending`."""
        tokens = self.pending
        if len(tokens) > MAX_TAKEN:
            tokens, self.pending = tokens[:MAX_TAKEN], tokens[MAX_TAKEN:]
        else:
            self.pending = []
            self.woken.clear()
        return tokens

    def _wake(self) -> None:
        """Let the reader's task run. Until it waits again, later tokens have to queue up after those in `pending`."""
        self.direct = None
        if self.hold is not None:
            self.hold.release()
            self.hold = None
        self.woken.set()

    def _append(self, run: TokenRun) -> None:
        fresh = run.tokens[self.next_offset - run.offset :]
        self.pending.extend(fresh)
        if run.verified and fresh:
            self.steps.add(self.emitted + self.next_offset, len(fresh))
        self.next_offset += len(fresh)
        if run.finish_reason is not None:
            self.finish_reason = run.finish_reason
