"""The errors for pairs of layouts that cannot exchange pages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.compatible import compatible
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer.rig import layout


def scaled(scale: float) -> PoolLayout:
    """The same layout with another scale of stored values."""
    key, value, *rest = layout().spec.planes
    spec = replace(layout().spec, planes=(key, replace(value, scale=scale), *rest))
    return replace(layout(), spec=spec)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (layout(fingerprint="large"), ["model", "tiny", "large", "same weights"]),
        (
            layout(fingerprint="tiny+abc"),
            ["draft model", "has none", "has abc", "steps and topk of speculation"],
        ),
        (
            layout(dtype="bfloat16"),
            ["KV dtype of target layer 0 k", "float32", "bfloat16", "model.dtype and kv.dtype"],
        ),
        (
            scaled(0.5),
            ["KV scale of target layer 0 v", "prefill node has 1.0", "decode node has 0.5", "model.path"],
        ),
        (layout(page_size=4), ["page size", "2", "4", "kv.page_size"]),
        (layout(heads=4), ["target layer 0 k", "(paged, 2x4)", "(paged, 4x4)", "same model"]),
        (
            layers_layout("tiny", "float32", 2, 16, [(2, 4)] * 3),
            ["number of KV planes", "only the decode node has target layer 2 k", "drafter"],
        ),
    ],
)
def test_incompatible_pairs_get_a_sentence_with_both_values(other: PoolLayout, words: list[str]) -> None:
    sentence = compatible(layout(), other)
    assert sentence is not None
    for word in words:
        assert word in sentence


def test_a_long_fingerprint_is_compared_whole_and_shown_in_part() -> None:
    """Two nodes with different drafts serve the same target: the error says so and fits on a screen."""
    ours, theirs = (layout(fingerprint=f"{'a' * 64}+{'b' * 63}{end}") for end in "cd")
    sentence = compatible(ours, theirs)
    assert sentence is not None
    assert sentence.startswith("draft model")
    assert "model.path" not in sentence
    assert "b" * 12 in sentence
    assert "b" * 13 not in sentence
    assert compatible(ours, ours) is None


def test_pool_sizes_and_ranks_may_differ() -> None:
    assert compatible(layout(num_pages=5), layout(num_pages=99)) is None
    four = layers_layout("tiny", "float32", 2, 16, [(2, 4), (2, 4)], 1, 4)
    assert compatible(layout(), four) is None
