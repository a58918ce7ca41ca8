"""Shapes, bucket ladders and hidden modes as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.graphs.ladders import (
    decode_request_buckets,
    prefill_token_buckets,
    verify_request_buckets,
)
from common.engine.graphs.spec import CaptureSpec, ShapeKey, request_shapes, token_shapes

NULL, LAST, FULL = CaptureHiddenMode


def spec(shapes: tuple[ShapeKey, ...]) -> CaptureSpec:
    return CaptureSpec("target", "prefill", ForwardMode.EXTEND, shapes)


def test_hidden_modes_are_ordered() -> None:
    """A graph that returns more hidden states serves a batch that needs fewer, never the reverse (row A1)."""
    assert NULL < LAST < FULL
    assert [mode.name for mode in CaptureHiddenMode] == ["NULL", "LAST", "FULL"]


def test_ladders_are_those_of_the_spec() -> None:
    prefill = prefill_token_buckets(8192)
    assert prefill[:11] == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48)  # 1 and 2 are additions of this project
    assert set(prefill) >= {256, 288, 512, 576, 1024, 1280, 4096, 4608, 8192}
    assert decode_request_buckets(600)[:7] == (1, 2, 4, 8, 12, 16, 24)
    assert set(decode_request_buckets(600)) >= {256, 272, 512, 544, 576, 600}
    verify = verify_request_buckets(300)
    assert verify[:9] == (*range(1, 9), 10)
    assert set(verify) >= {32, 40, 44, 64, 72, 256, 272, 288, 300}


@given(
    st.integers(0, 20000),
    st.sampled_from([prefill_token_buckets, decode_request_buckets, verify_request_buckets]),
)
def test_a_ladder_ascends_to_its_top(top: int, ladder: object) -> None:
    """The exact chunk size is a bucket, so full chunks have no padding. 0 means off: no shapes."""
    assert callable(ladder)
    rungs = ladder(top)
    assert list(rungs) == sorted(set(rungs))
    assert (rungs[-1] if top else rungs) == (top or ())


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_fit_is_the_smallest_shape_that_holds_the_batch(tokens: int, chunk: int) -> None:
    shapes = token_shapes(prefill_token_buckets(chunk))
    found = spec(shapes).fit(ShapeKey(tokens, requests=7))
    holding = [shape for shape in shapes if shape.tokens >= tokens]
    assert found == (holding[0] if holding else None)


def test_fit_counts_requests_and_tokens() -> None:
    shapes = request_shapes((1, 2, 4), tokens_per_request=3)
    assert shapes[-1] == ShapeKey(12, 4)
    assert spec(shapes).fit(ShapeKey(4, 4)) == ShapeKey(12, 4)
    assert spec(shapes).fit(ShapeKey(15, 5)) is None


def test_shapes_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        spec((ShapeKey(8), ShapeKey(4)))
    with pytest.raises(ValueError, match="ascend"):
        spec((ShapeKey(4, 2), ShapeKey(8, 1)))
    with pytest.raises(ValueError, match="variant"):
        CaptureSpec("target", "prefill", ForwardMode.EXTEND, (), variants=())
