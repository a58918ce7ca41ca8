"""Which batch may replay, and for which reason another may not; reasons are asked in a fixed order (row B4)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.graphs.admission import BatchFacts, Fallback, ReplayDecision, admit
from common.engine.graphs.spec import CaptureSpec, Feature, ShapeKey, request_shapes, token_shapes
from prefill_node.graphs.draft_prefill import draft_prefill_spec
from prefill_node.graphs.prefill_extend import extend_spec

NULL, LAST, FULL = CaptureHiddenMode
SPEC = CaptureSpec("target", "prefill", ForwardMode.EXTEND, token_shapes((8, 16, 64)), LAST, max_padding=2.0)
GOOD = BatchFacts(ForwardMode.EXTEND, ShapeKey(10, 3), LAST)
# Everything that can be wrong with a batch, in the order of the checks.
WRONG = [
    ("a", {"features": frozenset(Feature)}, Feature.INPUT_EMBEDS),
    ("b", {"mode": ForwardMode.DECODE}, Fallback.MODE),
    ("c", {"hidden": FULL}, Fallback.HIDDEN),
    ("f", {"live": ShapeKey(65, 1)}, Fallback.TOO_LARGE),
]


@pytest.mark.parametrize("index", range(len(WRONG)), ids=[f"B4-{letter}" for letter, _, _ in WRONG])
def test_reasons_are_given_in_a_fixed_order(index: int) -> None:
    _, change, reason = WRONG[index]
    assert admit(SPEC, replace(GOOD, **change)) == ReplayDecision(None, reason)  # type: ignore[arg-type]
    everything = GOOD
    for _, later, _ in reversed(WRONG[index:]):
        everything = replace(everything, **later)  # type: ignore[arg-type]
    assert admit(SPEC, everything).reason == reason


def test_a_batch_with_nothing_wrong_replays() -> None:
    assert admit(SPEC, GOOD) == ReplayDecision(ShapeKey(16))


@pytest.mark.parametrize("captured", CaptureHiddenMode)
@pytest.mark.parametrize("wanted", CaptureHiddenMode)
def test_a_graph_serves_its_hidden_mode_and_those_below(
    captured: CaptureHiddenMode, wanted: CaptureHiddenMode
) -> None:
    """Row B6: hidden modes are ordered, and a graph of a higher mode serves a lower one; the reverse runs eagerly."""
    found = admit(replace(SPEC, hidden=captured), replace(GOOD, hidden=wanted))
    assert (found.shape is not None) == (captured >= wanted)
    assert found.shape is not None or found.reason == Fallback.HIDDEN


@pytest.mark.parametrize("spec", [extend_spec((8, 16), FULL), draft_prefill_spec((8, 16))])
def test_prefill_graphs_have_a_place_for_given_embeddings(spec: CaptureSpec) -> None:
    """Prefill graphs take given embeddings; other graphs refuse such a batch with that reason (row B4)."""
    batch = BatchFacts(ForwardMode.EXTEND, ShapeKey(10, 3), LAST, features=frozenset((Feature.INPUT_EMBEDS,)))
    assert admit(spec, batch) == ReplayDecision(ShapeKey(16))


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_replays_where_the_graph_has_a_place_for_it(feature: Feature) -> None:
    """Given embeddings replay through a slot."""
    batch = replace(GOOD, features=frozenset((feature,)))
    assert admit(SPEC, batch).reason == feature
    assert admit(replace(SPEC, features=frozenset(Feature)), batch).shape == ShapeKey(16)


@pytest.mark.parametrize(
    ("tokens", "shape"), [(1, None), (3, None), (4, 8), (8, 8), (17, None), (32, 64), (64, 64)]
)
def test_padding_above_twice_the_live_tokens_runs_eagerly(tokens: int, shape: int | None) -> None:
    found = admit(SPEC, replace(GOOD, live=ShapeKey(tokens, 1)))
    assert found == (
        ReplayDecision(None, Fallback.PADDING) if shape is None else ReplayDecision(ShapeKey(shape))
    )


def test_a_graph_of_fixed_width_takes_no_other() -> None:
    fixed = replace(SPEC, shapes=request_shapes((4,), 2), tokens_per_request=2, max_padding=None)
    assert admit(fixed, replace(GOOD, live=ShapeKey(6, 3))).shape == ShapeKey(8, 4)
    assert admit(fixed, replace(GOOD, live=ShapeKey(6, 2))).reason == Fallback.WIDTH


def test_no_shapes_and_no_variant() -> None:
    assert admit(replace(SPEC, shapes=()), GOOD).reason == Fallback.NO_GRAPHS
    assert admit(SPEC, replace(GOOD, variants=("filtered",))).reason == Fallback.VARIANT
