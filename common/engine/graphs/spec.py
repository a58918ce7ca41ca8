"""What is captured, as data: shapes, hidden mode, and which batches a captured graph may serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode


class Axis(Enum):
    """What the rows of a static tensor are."""

    TOKEN = "token"
    REQUEST = "request"
    SCALAR = "scalar"  # one row, never padded


class Feature(StrEnum):
    """What a batch may bring that a graph must have been captured for; the value is the reason for refusal."""

    INPUT_EMBEDS = "input_embeds"  # embeddings given instead of token ids


@dataclass(frozen=True, slots=True, order=True)
class ShapeKey:
    """The size of a batch or of a graph. `requests` 0 in a graph: it has no request axis, any number fits."""

    tokens: int
    requests: int = 0

    def holds(self, live: ShapeKey) -> bool:
        return live.tokens <= self.tokens and (self.requests == 0 or live.requests <= self.requests)

    def rows(self, axis: Axis) -> int:
        if axis is Axis.TOKEN:
            return self.tokens
        return self.requests if axis is Axis.REQUEST else 1


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The identity of one captured graph."""

    shape: ShapeKey
    variant: str


PLAIN = "plain"  # the variant of a callable that has only one


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """One captured forward of a node. Off is an empty value: without shapes every batch runs eagerly."""

    model: str  # "target", "draft": labels of counters and of the start-up table
    phase: str  # "prefill", "decode" ...
    mode: ForwardMode
    shapes: tuple[ShapeKey, ...]  # ascending
    hidden: CaptureHiddenMode = CaptureHiddenMode.NULL  # what the captured graph returns
    variants: tuple[str, ...] = (PLAIN,)
    features: frozenset[Feature] = field(
        default=frozenset()
    )  # what the graph has a slot or an eager tail for
    tokens_per_request: int | None = None  # None: any mix of lengths
    max_padding: float | None = None  # padded / live tokens above which eager is better; None: never

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
        """Raises IndexError without shapes."""
        return self.shapes[-1]

    def fit(self, live: ShapeKey) -> ShapeKey | None:
        """The smallest shape that holds the batch, or None."""
        return next((shape for shape in self.shapes if shape.holds(live)), None)


def token_shapes(buckets: tuple[int, ...], bounded: ShapeKey = ShapeKey(0)) -> tuple[ShapeKey, ...]:
    """Shapes of a graph over tokens; those of up to `bounded.tokens` hold `bounded.requests`, the others any number."""
    return tuple(ShapeKey(tokens, bounded.requests if tokens <= bounded.tokens else 0) for tokens in buckets)


def request_shapes(buckets: tuple[int, ...], tokens_per_request: int = 1) -> tuple[ShapeKey, ...]:
    """Shapes of a graph over requests of a fixed width."""
    return tuple(ShapeKey(count * tokens_per_request, count) for count in buckets)
