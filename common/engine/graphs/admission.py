"""Decides whether a batch can replay a graph, and which one: a pure function of spec and batch.

Hidden modes are compared by their order and outputs are narrowed afterwards, embeddings replay if the graph has a
slot for them, and a batch that would be padded above `max_padding` runs eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.graphs.spec import PLAIN, CaptureSpec, Feature, ShapeKey


class Fallback(StrEnum):
    """The reason why a batch ran eagerly: together with the values of `Feature`, the labels of the fallback counter."""

    NO_GRAPHS = "no_graphs"  # this phase has no graphs
    MODE = "forward_mode"  # captured for another forward mode
    HIDDEN = "hidden_mode"  # the batch needs more hidden states than were captured
    WIDTH = "tokens_per_request"
    TOO_LARGE = "too_large"
    PADDING = "padding"
    VARIANT = "variant"
    CAPTURE_FAILED = "capture_failed"


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The facts about a batch that the host knows before it runs."""

    mode: ForwardMode
    live: ShapeKey
    hidden: CaptureHiddenMode = CaptureHiddenMode.NULL
    features: frozenset[Feature] = frozenset()
    variants: tuple[str, ...] = (PLAIN,)  # variants that can serve it, the cheapest first
    least: int = 0  # tokens of the smallest graph that may serve it, whatever the padding


@dataclass(frozen=True, slots=True)
class ReplayDecision:
    """A shape, or the reason for running eagerly."""

    shape: ShapeKey | None
    reason: str = ""


def admit(spec: CaptureSpec, facts: BatchFacts) -> ReplayDecision:
    """Check embeddings, forward mode, hidden mode, width, size, padding and variant in this order.

    No batch has replaced embedding rows, since requests for them are refused. Log-probabilities of prompts need no
    check here: they are computed from the hidden states that a replay returns.
    """
    if not spec.shapes:
        return ReplayDecision(None, Fallback.NO_GRAPHS)
    missing = facts.features - spec.features
    shape = spec.fit(facts.live, facts.least)
    width = spec.tokens_per_request
    checks = (
        (Feature.INPUT_EMBEDS in missing, Feature.INPUT_EMBEDS),
        (facts.mode is not spec.mode, Fallback.MODE),
        (facts.hidden > spec.hidden, Fallback.HIDDEN),
        (width is not None and facts.live.tokens != facts.live.requests * width, Fallback.WIDTH),
        (shape is None, Fallback.TOO_LARGE),
        (_wasteful(spec, shape, max(facts.live.tokens, facts.least)), Fallback.PADDING),
        (not set(facts.variants) & set(spec.variants), Fallback.VARIANT),
    )
    for refused, reason in checks:
        if refused:
            return ReplayDecision(None, reason)
    return ReplayDecision(shape)


def _wasteful(spec: CaptureSpec, shape: ShapeKey | None, tokens: int) -> bool:
    return shape is not None and spec.max_padding is not None and shape.tokens > spec.max_padding * tokens
