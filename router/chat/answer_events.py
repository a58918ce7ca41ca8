"""The events of an answer, in the order in which the model writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

Span = tuple[int, int]  # characters of the answer, from the first to before the second


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the text that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer itself. `spans`: its positions in the model's output, in the order of its text."""

    text: str
    spans: tuple[Span, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A tool call begins: its function is known, its arguments follow."""

    index: int
    identity: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Content | CallOpened | CallArguments
