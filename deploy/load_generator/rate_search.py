"""Chooses the rates that a search for the highest load within limits probes, and says what it found.

The rate doubles, or halves, until one rate keeps the share of good requests and another one misses it. Then the
interval between them is halved until it is as narrow as the resolution. Nothing here sends a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """The options of a search. Rates are requests per second."""

    # Share of the planned requests that must keep both limits.
    share: float = 0.99
    start: float = 4.0
    lowest: float = 0.25
    highest: float = 1024.0
    # Largest interval between the kept and the missed rate, as a share of the kept one.
    resolution: float = 0.05
    # Probes of each server at most.
    probes: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("--share", f"{self.share:g} is not a share above 0 and at most 1, such as 0.99")
        if not self.lowest <= self.start <= self.highest:
            allowed = f"--min-rate ({self.lowest:g}) and --max-rate ({self.highest:g})"
            raise ConfigError("--rate", f"a search cannot begin with {self.start:g}/s, outside {allowed}")


class Outcome(StrEnum):
    """The reason for which a search ended."""

    FOUND = "found"
    ABOVE = "kept at the highest rate"
    BELOW = "missed at the lowest rate"
    PROBES = "probes used up"
    FAILED = "every request failed"
    STUCK = "no recovery"


@dataclass(slots=True)
class RateSearch:
    """The search for the rate of one server: the highest rate that was kept, and the lowest one that was missed."""

    bounds: SearchBounds
    kept: float | None = None
    missed: float | None = None
    probes: int = 0
    ended: Outcome | None = None
    reason: str = ""  # an error of the server, if that ended the search

    def next_rate(self) -> float | None:
        """Return the rate to probe next; None if the search has ended."""
        return None if self.outcome else self._candidate()

    def note(self, rate: float, kept: bool) -> None:
        """Take the result of a probe."""
        self.probes += 1
        if kept:
            self.kept = rate
        else:
            self.missed = rate

    def end(self, outcome: Outcome, reason: str) -> None:
        """End the search because of what the server did."""
        self.ended, self.reason = outcome, reason

    @property
    def outcome(self) -> Outcome | None:
        """The reason why the search has ended; None while it goes on."""
        if self.ended:
            return self.ended
        if self.kept is not None and self.missed is not None:
            if self.missed - self.kept <= self.bounds.resolution * self.kept:
                return Outcome.FOUND
        elif self.kept is not None and self.kept >= self.bounds.highest:
            return Outcome.ABOVE
        elif self.missed is not None and self.missed <= self.bounds.lowest:
            return Outcome.BELOW
        return Outcome.PROBES if self.probes >= self.bounds.probes else None

    def _candidate(self) -> float:
        if self.kept is None and self.missed is None:
            return self.bounds.start
        if self.missed is None:
            return min(2 * (self.kept or 0), self.bounds.highest)
        if self.kept is None:
            return max(self.missed / 2, self.bounds.lowest)
        return (self.kept + self.missed) / 2

    @property
    def sentence(self) -> str:
        """The result in words."""
        share = f"{100 * self.bounds.share:g} % of requests"
        known = "no rate that was probed" if self.kept is None else f"{self.kept:g}/s"
        missed = "" if self.missed is None else f" and not at {self.missed:g}/s"
        match self.outcome:
            case Outcome.FOUND:
                return f"{share} kept both limits at {known}{missed}"
            case Outcome.ABOVE:
                return (
                    f"{share} kept both limits even at {known}, the highest rate allowed: the limit is higher; "
                    "raise --max-rate to find it"
                )
            case Outcome.BELOW:
                return (
                    f"{share} did not keep both limits even at {self.missed:g}/s, the lowest rate allowed: "
                    "lower --min-rate, or allow more with --ttft-ms, --gap-ms or --share"
                )
            case Outcome.PROBES:
                return (
                    f"{share} kept both limits at {known}{missed}, but {self.bounds.probes} probes were not enough "
                    f"to come within {100 * self.bounds.resolution:g} %: raise --max-probes, or begin nearer (--rate)"
                )
            case Outcome.FAILED | Outcome.STUCK:
                rates = (
                    f"{share} kept both limits at {known}{missed}" if self.probes else "No rate was probed"
                )
                return f"the search ended early: {self.reason}. {rates}"
            case None:
                return f"the search goes on: {share} kept both limits at {known}{missed}"
