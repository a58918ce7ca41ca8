"""One request on its way through a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from common.engine.sampling.sampling_plan import finish_reason
from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageLease
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.messages.identity import NodeRef


class Backup(NamedTuple):
    """What a retracted request holds in host memory."""

    num_pages: int
    nbytes: int


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """Lives in exactly one queue at a time (see queues.py).

    Positions: prompt tokens 0 .. n-1 arrive with KV. output[i] stands at n + i. A step writes the KV of the last known
    token and draws 1 .. tokens_per_step tokens; how many is known when it is read. `launched` counts drawn tokens,
    those of an unread step as the most that it may draw: seq_len = n + launched - 1 is exact while nothing is in
    flight and an upper bound else.
    """

    room: int
    request_id: str
    prompt: list[int]
    emitted: int  # tokens at the end of prompt that are output already
    sampling: SamplingParams
    prefill: NodeRef
    received: float  # monotonic seconds
    deadline: float
    images: tuple[ImageSpan, ...] = ()  # in the prompt
    salt: bytes = b""  # of its pages in the prefix cache
    lease: PageLease | None = None
    row: int = 0  # of page table and relay state, 0 = none
    output: list[int] = field(
        default_factory=list
    )  # tokens the host knows; the first one came with the record
    launched: int = 0  # tokens drawn, the first included, and the most that unread steps may draw
    in_flight: int = 0  # steps not read yet that write to this request's row and pages
    rounds: int = 0  # steps of it that verified drafts
    emitted_in_rounds: int = 0  # tokens of the answer that they gave
    skipped: int = 0  # how often later requests were admitted before this one
    ended: bool = False
    trusted: bool = (
        True  # False: its KV gave logits that are not finite, so the prefix cache must not keep it
    )
    retract: bool = False  # leaves the batch as soon as nothing is in flight
    backup: Backup | None = None
    draft: DraftRow = NO_DRAFT  # what its row starts with, at hand-over and at resume
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def contents(self) -> list[int]:
        """The prompt with images by their content. Raises InvalidRequest for spans that do not fit."""
        if not self.images:
            return self.prompt
        keys: list[int] = with_images(self.prompt, self.images).tolist()
        return keys

    @property
    def seq_len(self) -> int:
        """Tokens with KV after everything launched, at most."""
        return len(self.prompt) + self.launched - 1

    @property
    def max_output(self) -> int:
        """Tokens that this attempt may emit at most, the first included."""
        return self.sampling.max_tokens - self.emitted

    @property
    def exhausted(self) -> bool:
        """Unread steps draw at least one token each, and that is all it may have: another step would be wasted."""
        return len(self.output) + self.in_flight >= self.max_output

    @property
    def most_kv(self) -> int:
        """Tokens that ever need KV: all but the last one that it may emit."""
        return len(self.prompt) + self.max_output - 1

    @property
    def accept_length(self) -> float | None:
        """Emitted tokens per step that verified drafts; None without any."""
        return self.emitted_in_rounds / self.rounds if self.rounds else None

    def remaining(self) -> int:
        return max(self.max_output - self.launched, 0)

    def step_launched(self, tokens_per_step: int) -> None:
        """A step that may draw so many tokens is on its way."""
        self.in_flight += 1
        self.launched += tokens_per_step

    def step_read(self, tokens_per_step: int, drawn: int) -> None:
        """The oldest step under way is read: it drew `drawn` tokens."""
        assert 0 < drawn <= tokens_per_step, f"{drawn} tokens from a step of at most {tokens_per_step}"
        self.in_flight -= 1
        self.launched -= tokens_per_step - drawn

    def say(self, token: int) -> str | None:
        """Take a drawn token into the output; returns why the request ends with it, or None."""
        self.output.append(token)
        said = self.emitted + len(self.output)
        reason = finish_reason(token, said, self.sampling)
        if self.sampling.min_tokens and said >= self.sampling.min_tokens:
            self.sampling = replace(
                self.sampling, min_tokens=0
            )  # nothing is withheld any more: steps are cheaper
        return reason

    def computed(self) -> list[int]:
        """What the prefix cache may keep: tokens with KV that the host knows, images by their content."""
        return self.contents + self.output[:-1]

    def mark(self, stage: str, now: float) -> None:
        self.stages.setdefault(stage, now - self.received)


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of one request in one step, as a step reports them."""

    request: DecodeRequest
    tokens: list[OutputToken | None]  # None: the logits were not finite; at least one entry
    drafted: int = 0  # draft tokens that the step verified; all tokens but one were drafts
