"""A request on a decode node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.errors import RequestError
from common.grammar.token_rules import Follower, PendingFollower
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageLease
from common.messages.decode_inbox import Reserve
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.messages.identity import NodeRef
from common.node.finishing import follow_token
from common.node.hidden_states import StateRows
from common.node.to_router import NO_ROUTER, ToRouter
from decode_node.forced_choice import ForcedRow
from decode_node.held_pages import HeldPages
from kv_transfer.page_check import PageCheck


class BackupSize(NamedTuple):
    """The host memory that holds a retracted request."""

    num_pages: int
    nbytes: int
    held: HeldPages | None = None  # its pages, if they are with those of cached prefixes


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request, in exactly one queue at a time (see queues.py).

    Positions: the prompt tokens 0 .. n-1 arrive with KV, and output[i] is at position n + i. A step writes the KV of
    the last known token and draws 1 .. tokens_per_step tokens; how many is known when the step is read. `launched`
    counts drawn tokens, and for an unread step the most that it may draw. So seq_len = n + launched - 1 is exact while
    nothing is in flight, and otherwise an upper bound.
    """

    room: int
    request_id: str
    # An array where `of` makes it: a garbage collection would visit every item of the lists of a crowd.
    prompt: Sequence[int]
    emitted: int  # tokens at the end of `prompt` that are already output
    sampling: SamplingParams
    prefill: NodeRef
    received: float  # monotonic seconds
    deadline: float
    router: ToRouter = NO_ROUTER  # which sent it and gets its tokens
    images: tuple[ImageSpan, ...] = ()  # in the prompt
    waited: float = 0.0  # seconds before `received`, in the queues of nodes that gave it back
    priority: int = 0  # lower goes first
    salt: bytes = b""  # separates its pages in the prefix cache from other requests'
    lease: PageLease | None = None
    row: int = 0  # in the page table and the relay state; 0 = none
    # tokens known to the host; the first came with the record
    output: list[int] = field(default_factory=list)
    launched: int = 0  # tokens drawn, including the first, plus the most that unread steps may draw
    in_flight: int = 0  # unread steps that write to this request's row and pages
    rounds: int = 0  # steps of this request that verified drafts
    emitted_in_rounds: int = 0  # tokens of the answer from those steps
    skipped: int = 0  # number of later requests that were admitted before this one
    ended: bool = False
    trusted: bool = True  # False after non-finite logits: the prefix cache must not keep its KV
    retract: bool = False  # leaves the batch as soon as nothing is in flight
    backup: BackupSize | None = None
    fetching: int = 0  # key of the fetch whose copies to its pages have not ended; 0: nothing is fetched
    # They compare its pages: nothing of it may leave before their outcome is known.
    checks: Sequence[PageCheck] = ()
    compilation: PendingFollower | None = None  # its grammar's, until `matcher` is set
    matcher: Follower | None = None  # has followed the answer so far
    # Its next step needs masks, which follow from the results of all earlier steps.
    masked: bool = False
    forced: tuple[int, ...] = ()  # the next tokens that `matcher` forces, as drafts of its next step
    draft: DraftRow = NO_DRAFT  # initial draft state of its row, after hand-over or resume
    drawn_at: float = 0.0  # monotonic seconds when its latest token was drawn, as far as the host can tell
    stages: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Reserve, router: ToRouter, now: float) -> DecodeRequest:
        """Return the request that `router` has sent."""
        return cls(
            room=message.room,
            request_id=message.request_id,
            prompt=array("q", message.token_ids),
            emitted=message.emitted,
            sampling=message.sampling,
            prefill=message.prefill,
            received=now,
            waited=message.waited_ms / 1000,
            deadline=now + message.deadline_ms / 1000,
            router=router,
            images=message.images,
            salt=message.salt,
            priority=message.priority,
        )

    @property
    def contents(self) -> Sequence[int]:
        """The prompt as prefix-cache keys, with images by content. Raises InvalidRequest for spans that do not fit."""
        if not self.images:
            return self.prompt
        keys: list[int] = with_images(self.prompt, self.images).tolist()
        return keys

    @property
    def queued(self) -> float:
        """The time since which it counts as waiting."""
        return self.received - self.waited

    @property
    def seq_len(self) -> int:
        """Upper bound of the tokens with KV after all launched steps."""
        return len(self.prompt) + self.launched - 1

    @property
    def max_output(self) -> int:
        """The most tokens that this attempt may emit, including the first."""
        return self.sampling.max_tokens - self.emitted

    @property
    def takes_part(self) -> bool:
        """True if it has a next step."""
        return not (self.ended or self.retract or self.exhausted)

    @property
    def unchecked(self) -> bool:
        """True while its pages are compared, unless nobody waits for it any more."""
        return bool(self.checks) and not self.ended

    @property
    def exhausted(self) -> bool:
        """True if unread steps already suffice for max_tokens, because each draws at least one token."""
        return len(self.output) + self.in_flight >= self.max_output

    @property
    def most_kv(self) -> int:
        """Tokens that will ever need KV: all but the last one that may be emitted."""
        return len(self.prompt) + self.max_output - 1

    @property
    def accept_length(self) -> float | None:
        """Emitted tokens per step that verified drafts; None if there was no such step."""
        return self.emitted_in_rounds / self.rounds if self.rounds else None

    def remaining(self) -> int:
        return max(self.max_output - self.launched, 0)

    def step_launched(self, tokens_per_step: int) -> None:
        """Count a launched step that may draw up to `tokens_per_step` tokens."""
        self.in_flight += 1
        self.launched += tokens_per_step

    def step_read(self, tokens_per_step: int, drawn: int) -> None:
        """Count the oldest launched step as read: it drew `drawn` tokens."""
        assert 0 < drawn <= tokens_per_step, f"{drawn} tokens from a step of at most {tokens_per_step}"
        self.in_flight -= 1
        self.launched -= tokens_per_step - drawn

    def append(self, token: int) -> str | None:
        """Append a drawn token to the output. Return the finish reason if the request ends with it, else None.

        If its matcher cannot go on, `failure` says why.
        """
        self.output.append(token)
        output_tokens = self.emitted + len(self.output)
        reason = follow_token(token, output_tokens, self.sampling, self.matcher)
        if self.sampling.min_tokens and output_tokens >= self.sampling.min_tokens:
            # No token is masked any more, which makes steps cheaper.
            self.sampling = replace(self.sampling, min_tokens=0)
        return reason

    def needs_masks(self, tokens: int) -> bool:
        """Return whether a mask may forbid tokens that a step of up to `tokens` tokens draws."""
        unread = self.launched - len(self.output)
        return self.matcher is not None and self.matcher.unmasked < unread + tokens

    @property
    def forced_row(self) -> ForcedRow:
        return ForcedRow(len(self.forced), self.masked)

    @property
    def failure(self) -> RequestError | None:
        """The error because of which the matcher of its grammar cannot go on, which ends the request."""
        return None if self.matcher is None else self.matcher.failure

    def follow_grammar(self, now: float) -> None:
        """Set `matcher` once the grammar is compiled, and replay the answer so far. Raises RequestError."""
        if self.compilation is None or not self.compilation.ready(now):
            return
        self.matcher = self.compilation.matcher()
        self.compilation = None
        self.matcher.accept((*self.prompt[len(self.prompt) - self.emitted :], *self.output))
        if self.matcher.failure is not None:
            raise self.matcher.failure

    def computed(self) -> list[int]:
        """Return the keys of what the prefix cache may keep: tokens with KV that the host knows, images by content."""
        return [*self.contents, *self.output[:-1]]

    def mark(self, stage: str, now: float) -> None:
        self.stages.setdefault(stage, now - self.received)


@dataclass(frozen=True, slots=True)
class Emission:
    """The tokens of one request in one step."""

    request: DecodeRequest
    tokens: list[OutputToken | None]  # at least one entry; None if the logits were not finite
    drafted: int = 0  # draft tokens that the step verified, except forced ones
    forced: int = 0  # forced tokens that the step verified as drafts
    # The hidden state that each token was drawn from, if the router gets hidden states.
    states: StateRows | None = None

    @property
    def verified_drafts(self) -> bool:
        """Return whether the step has verified drafts or forced tokens."""
        return self.drafted > 0 or self.forced > 0
