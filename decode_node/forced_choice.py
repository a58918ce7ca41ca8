"""Decides when forced tokens are verified in a wide step instead of a usual one.

Such a step has a wide window and no draft phase: each request verifies as many forced tokens as fit, and requests
without any verify the drafts that their rows carry from the previous round, if the drafter keeps some there. All of it
is decided without a device and without clocks, so that every process that plans a step decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from decode_node.speculative.width_policy import Acceptance

# A step for forced tokens gains at least one token for this many requests: it takes up to a tenth more time than one of
# plain decoding.
FORCED_SHARE = 8
# The time of one forward of a draft model, as a share of the rest of a round. Measured: a head of an 8B model on an
# H200 takes 3 to 5 %, those of the tiny models on CPUs 5 to 10 %.
DRAFT_COST = 0.05


class ForcedStep(NamedTuple):
    """A step that verifies forced tokens."""

    width: int  # the most tokens per request
    batch: int  # its largest batch


class ForcedRow(NamedTuple):
    """The known facts about one request before a step."""

    forced: int  # tokens that its grammar, or its limit of reasoning, forces next
    constrained: bool  # whether a mask may forbid tokens of its step


class ForcedChoice(Protocol):
    """Decides between a step for forced tokens and a usual one, and observes which drafts are accepted."""

    def gains(self, rows: Sequence[ForcedRow], width: int, usual: int, /) -> bool:
        """Return whether to verify up to `width` forced tokens per request instead of `usual` drafts."""
        ...

    def observe(self, constrained: bool, drafts: int, accepted: Sequence[int], /) -> None:
        """Record how many of `drafts` were accepted, for each request without forced tokens."""
        ...


def _repays(rows: Sequence[ForcedRow], width: int) -> bool:
    """Return whether a step for forced tokens gains enough of them over plain decoding, as all requests take part."""
    return FORCED_SHARE * sum(min(row.forced, width) for row in rows) >= len(rows)


class ForcedShare:
    """For plain decoding: a step for forced tokens has to gain enough of them."""

    def gains(self, rows: Sequence[ForcedRow], width: int, usual: int, /) -> bool:
        return _repays(rows, width)

    def observe(self, constrained: bool, drafts: int, accepted: Sequence[int], /) -> None:
        """No-op: there are no drafts."""


class ForcedGain:
    """For rounds of a draft model: chooses the step that is expected to emit more tokens in the same time.

    Args:
        widest: the most drafts of a usual round.
        carried: drafts that a request without forced tokens verifies in a step for forced tokens.
        skipped: forwards of the draft model that such a step saves.
    """

    def __init__(self, widest: int, carried: int, skipped: int) -> None:
        self._carried = carried
        self._usual_time = 1 + DRAFT_COST * skipped
        # For free and for constrained requests, because what a grammar leaves open is harder to draft.
        self._acceptance = Acceptance(widest), Acceptance(widest)

    def gains(self, rows: Sequence[ForcedRow], width: int, usual: int, /) -> bool:
        if not usual:  # a round that drafts nothing, which costs no more than a step of plain decoding
            return _repays(rows, width)
        instead = self._tokens(rows, width, min(self._carried, width))
        return instead * self._usual_time >= self._tokens(rows, usual, usual)

    def observe(self, constrained: bool, drafts: int, accepted: Sequence[int], /) -> None:
        if drafts:
            self._acceptance[constrained].observe(drafts, [min(count, drafts) for count in accepted])

    def _tokens(self, rows: Sequence[ForcedRow], width: int, drafts: int) -> float:
        """Return the expected tokens of a step of `width` forced tokens, where other requests verify `drafts`."""
        others = [each.tokens(drafts) for each in self._acceptance]
        return sum(min(row.forced, width) + 1 if row.forced else others[row.constrained] for row in rows)
