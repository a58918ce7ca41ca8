"""The rules by which steps are planned: their sizes, and the policies for widths and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode_node.forced_choice import ForcedChoice, ForcedRow, ForcedShare, ForcedStep
from decode_node.request import DecodeRequest, Emission
from decode_node.step_plan import StepPlan

Drafts = tuple[tuple[int, ...], ...]


class Widths(Protocol):
    """Chooses the width of each step and observes the outcome."""

    def choose(self, batch: int, /) -> int:
        """Return the number of drafts for a batch of `batch` requests."""
        ...

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float, /) -> None:
        """Record a step: its time, and the accepted drafts of each request that continues."""
        ...


class FixedWidth:
    """Every step has the same width."""

    def __init__(self, width: int = 0) -> None:
        self._width = width

    def choose(self, batch: int, /) -> int:
        return self._width

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float, /) -> None:
        pass


class TextDrafts(Protocol):
    """Proposes drafts from the texts that the host knows."""

    @property
    def needs_results(self) -> bool:
        """True if no step is planned while the results of another are unread, because texts are not known yet."""
        ...

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        """Return up to `width` drafts for each request; empty if no drafts come from texts."""
        ...


class NoTextDrafts:
    """No host drafts: a draft model proposes on the device, or speculation is off."""

    needs_results = False

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        return ()


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules by which the steps of a node are planned."""

    # KV slots that a step may write per request, which bounds the tokens that it draws; see `tokens_of` for one width.
    tokens_per_step: int = 1
    # KV slots that a step may need past the last token of a request, for parallel branches of a tree
    extra_slots: int = 0
    widths: Widths = field(default_factory=FixedWidth)
    drafts: TextDrafts = field(default_factory=NoTextDrafts)
    # the most forced tokens that a usual step verifies as drafts; 0: none
    forced_drafts: int = 0
    # wide steps for forced tokens, widest first, so that each takes larger batches than the one before
    forced_steps: tuple[ForcedStep, ...] = ()
    forced_choice: ForcedChoice = field(default_factory=ForcedShare)
    # drafts that a request without forced tokens verifies in these steps
    carried: int = 0
    # requests may ask for hidden states
    hidden_states: bool = False

    @property
    def most_tokens(self) -> int:
        """KV slots that any step may write per request."""
        return self.tokens_of(max((step.width for step in self.forced_steps), default=0))

    def tokens_of(self, width: int) -> int:
        """Return the KV slots that a step of this width may write per request."""
        return max(self.tokens_per_step, width + 1)

    def most_forced(self, batch: int) -> int:
        """Return how many forced tokens per request a step of this many requests can verify."""
        return max(self._forced_step(batch), self.forced_drafts)

    def forced_width(self, rows: Sequence[ForcedRow]) -> int:
        """Return the width of the step for forced tokens that this batch takes; 0: a usual step."""
        width = self._forced_step(len(rows))
        if not width or not any(row.forced for row in rows):
            return 0
        return width if self.forced_choice.gains(rows, width, self.widths.choose(len(rows))) else 0

    def observe(self, plan: StepPlan, emissions: Sequence[Emission], seconds: float) -> None:
        """Record the results of a step, whose device time was `seconds`."""
        # Drafts past the end of an answer and forced tokens say nothing about acceptance.
        telling = [each for each in emissions if not (each.request.ended or each.forced)]
        if not plan.forced_step:
            accepted = [len(each.tokens) - 1 for each in telling]
            self.widths.observe(len(plan.rows), plan.width, accepted, seconds)
        if not plan.masked:
            return
        drafts = self.carried if plan.forced_step else plan.width
        for constrained in (False, True):
            alike = [each for each in telling if each.request.masked == constrained]
            if alike:
                self.forced_choice.observe(constrained, drafts, [len(each.tokens) - 1 for each in alike])

    def _forced_step(self, batch: int) -> int:
        """Return the width of the step for forced tokens that takes this many requests; 0: there is none."""
        return next((step.width for step in self.forced_steps if batch <= step.batch), 0)
