"""How the steps of a node are planned: their sizes, and who chooses widths and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode_node.request import DecodeRequest

Drafts = tuple[tuple[int, ...], ...]


class Widths(Protocol):
    """Chooses the width of each step, and sees what came of it."""

    def choose(self, batch: int, /) -> int:
        """Drafts in a row for a batch of so many requests."""
        ...

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float, /) -> None:
        """A step of `batch` requests took so long; so many drafts of each request that goes on were accepted."""
        ...


class FixedWidth:
    """Every step is of one width."""

    def __init__(self, width: int = 0) -> None:
        self._width = width

    def choose(self, batch: int, /) -> int:
        return self._width

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float, /) -> None:
        pass


class TextDrafts(Protocol):
    """Drafts that follow from what the host knows of a text."""

    @property
    def needs_results(self) -> bool:
        """Whether a request sits out while a step of its own is unread, since its text is not known yet."""
        ...

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        """Up to `width` drafts for each request; empty where none are proposed from texts."""
        ...


class NoTextDrafts:
    """A draft model proposes on the device, or nobody does."""

    needs_results = False

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        return ()


@dataclass(frozen=True, slots=True)
class StepRules:
    """How the steps of a node are planned."""

    tokens_per_step: int = 1  # KV slots that one step may write, and tokens that it may draw, per request
    # KV slots that it may need past the last token of a request, for branches that lie side by side
    extra_slots: int = 0
    widths: Widths = field(default_factory=FixedWidth)
    drafts: TextDrafts = field(default_factory=NoTextDrafts)
