"""Describes what is captured: shapes, hidden mode, and which batches a captured graph can serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode


class Axis(Enum):
    """The meaning of the rows of a static tensor."""

    TOKEN = "token"
    REQUEST = "request"


class Feature(StrEnum):
    """A property of a batch that its graph must have been captured for; the value is the reason for a refusal."""

    INPUT_EMBEDS = "input_embeds"  # the batch has embeddings instead of token ids


@dataclass(frozen=True, slots=True, order=True)
class ShapeKey:
    """The size of a batch or of a graph. A graph with `requests` 0 has no request axis and fits any number."""

    tokens: int
    requests: int = 0

    def holds(self, live: ShapeKey) -> bool:
        return live.tokens <= self.tokens and (self.requests == 0 or live.requests <= self.requests)

    def rows(self, axis: Axis) -> int:
        return self.tokens if axis is Axis.TOKEN else self.requests


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The identity of one captured graph."""

    shape: ShapeKey
    variant: str


PLAIN = "plain"  # the variant of a callable that has only one


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """One captured forward of a node. Without shapes, graphs are off and every batch runs eagerly."""

    model: str  # "target" or "draft"; a label of counters and of the start-up table
    phase: str  # "prefill", "decode" ...
    mode: ForwardMode
    shapes: tuple[ShapeKey, ...]  # ascending
    hidden: CaptureHiddenMode = CaptureHiddenMode.NULL  # what the captured graph returns
    variants: tuple[str, ...] = (PLAIN,)
    # Features for which the graph has a slot or an eager tail.
    features: frozenset[Feature] = field(default=frozenset())
    tokens_per_request: int | None = None  # None: any mix of lengths
    # Ratio of padded to live tokens above which the batch runs eagerly; None: no limit.
    max_padding: float | None = None

    def __post_init__(self) -> None:
        if list(self.shapes) != sorted(set(self.shapes)):
            raise ValueError(f"{self.phase}/{self.model}: shapes must ascend, found {self.shapes}")
        requests = [shape.requests or math.inf for shape in self.shapes]
        if requests != sorted(requests):
            raise ValueError(
                f"{self.phase}/{self.model}: requests must ascend with tokens, found {self.shapes}"
            )
        if not self.variants:
            raise ValueError(f"{self.phase}/{self.model}: a graph has at least one variant")

    @property
    def largest(self) -> ShapeKey:
        """The largest shape; an empty one without shapes."""
        return self.shapes[-1] if self.shapes else ShapeKey(0)

    def fit(self, live: ShapeKey, least: int = 0) -> ShapeKey | None:
        """Return the smallest shape of at least `least` tokens that holds the batch, or None."""
        return next((shape for shape in self.shapes if shape.tokens >= least and shape.holds(live)), None)


def token_shapes(buckets: tuple[int, ...], bounded: ShapeKey = ShapeKey(0)) -> tuple[ShapeKey, ...]:
    """Return the shapes of a graph over tokens.

    Shapes of up to `bounded.tokens` tokens hold `bounded.requests` requests, larger ones any number.
    """
    return tuple(ShapeKey(tokens, bounded.requests if tokens <= bounded.tokens else 0) for tokens in buckets)


def request_shapes(buckets: tuple[int, ...], tokens_per_request: int = 1) -> tuple[ShapeKey, ...]:
    """Return the shapes of a graph over requests of a fixed width."""
    return tuple(ShapeKey(count * tokens_per_request, count) for count in buckets)
