"""The rules by which steps are planned: their sizes, and the policies for widths and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from decode_node.request import DecodeRequest

# A step for forced tokens gains at least one token for so many requests: it takes up to a tenth more time.
FORCED_SHARE = 8
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
        """True if a request skips steps while the results of one are unread, because its text is not known yet."""
        ...

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        """Return up to `width` drafts for each request; empty if no drafts come from texts."""
        ...


class NoTextDrafts:
    """No host drafts: a draft model proposes on the device, or speculation is off."""

    needs_results = False

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        return ()


class ForcedStep(NamedTuple):
    """A step that verifies forced tokens where steps have no drafts otherwise."""

    width: int  # the most tokens per request
    batch: int  # its largest batch


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules by which the steps of a node are planned."""

    # KV slots that a step may write per request, a bound of the tokens that it draws; `tokens_of` gives that of a width
    tokens_per_step: int = 1
    # KV slots that a step may need past the last token of a request, for parallel branches of a tree
    extra_slots: int = 0
    widths: Widths = field(default_factory=FixedWidth)
    drafts: TextDrafts = field(default_factory=NoTextDrafts)
    # the most tokens forced by a grammar that a step verifies as drafts; 0: none
    forced_drafts: int = 0
    # widest first, so that each takes larger batches than the one before; empty: each step can verify forced tokens
    forced_steps: tuple[ForcedStep, ...] = ()
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
        """Return how many forced tokens per request a step of so many requests can verify."""
        if not self.forced_steps:
            return self.forced_drafts
        return next((step.width for step in self.forced_steps if batch <= step.batch), 0)

    def forced_width(self, forced: Sequence[int]) -> int:
        """Return the width of the plain step that verifies forced tokens; 0: a usual step.

        All requests of the batch take part with as many tokens, so the step has to gain enough of them. `forced` counts
        the tokens of each request, at most `most_forced`.
        """
        enough = FORCED_SHARE * sum(forced) >= len(forced)
        return self.most_forced(len(forced)) if self.forced_steps and any(forced) and enough else 0
