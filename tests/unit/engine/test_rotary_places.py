"""Rotary positions around images against transformers' get_rope_index, in whole prompts and in any chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLModel

from common.checkpoint.rope_config import RopeConfig
from common.engine.forward.rotary_places import ImageAxes, OneAxis, rotary_places
from common.engine.layers.placement import Placement
from common.engine.layers.rotary import Rotary
from common.engine.ops.rotary import (
    rotary_angles_by_axis_reference,
    rotary_angles_by_axis_triton,
    rotary_angles_reference,
)
from common.engine.ops.triton_kernel import tl
from common.messages.generation import ImageSpan

MERGE = 2
# Text between images, as templates insert it: transformers takes adjacent images for one.
LAYOUTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4)


def spans_of(layout: list[tuple[int, int, int]]) -> tuple[tuple[ImageSpan, ...], int]:
    """Return (images, position at which the text after them begins)."""
    spans: list[ImageSpan] = []
    end = 0
    for text, rows, columns in layout:
        spans.append(ImageSpan(end + text, rows * columns, bytes(32), rows))
        end += text + rows * columns
    return tuple(spans), end


def theirs(spans: tuple[ImageSpan, ...], count: int) -> tuple[np.ndarray[Any, Any], int]:
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model: Any = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vision_config=vision)
    kinds = torch.zeros(1, count, dtype=torch.int32)
    for span in spans:
        kinds[0, span.offset : span.offset + span.length] = 1
    grids = torch.tensor([[1, MERGE * span.rows, MERGE * span.columns] for span in spans])
    positions, delta = model.get_rope_index(torch.zeros(1, count, dtype=torch.int64), kinds, grids)
    return positions[:, 0].T.numpy(), int(delta)


@given(LAYOUTS, st.integers(1, 5), st.data())
def test_positions_are_those_of_transformers_in_any_chunk(
    layout: list[tuple[int, int, int]], tail: int, data: st.DataObject
) -> None:
    spans, count = spans_of(layout)
    count += tail
    expected, delta = theirs(spans, count) if spans else (np.arange(count)[:, None].repeat(3, 1), 0)
    places = ImageAxes()
    assert np.array_equal(places.positions(spans, 0, count), expected)
    assert places.delta(spans) == delta <= 0
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    assert np.array_equal(places.positions(spans, start, end), expected[start:end])
    answer = places.positions(spans, count, count + 3)
    assert np.array_equal(answer, (np.arange(count, count + 3) + delta)[:, None].repeat(3, 1)), (
        "text continues after the images"
    )


def test_a_model_of_one_axis_counts_through_images() -> None:
    spans, end = spans_of([(2, 3, 3)])
    plain = rotary_places(RopeConfig())
    assert isinstance(plain, OneAxis)
    assert np.array_equal(plain.positions(spans, 1, end), np.arange(1, end))
    assert plain.delta(spans) == 0
    assert isinstance(rotary_places(RopeConfig(sections=(1, 2, 1))), ImageAxes)


@pytest.mark.skipif(tl is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sections", [(2, 3, 3), (16, 24, 24), (4, 4, 4)])
def test_the_kernel_of_angles_by_axis(dtype: torch.dtype, sections: tuple[int, ...]) -> None:
    half = sum(sections)
    inv_freq = 10000.0 ** (-torch.arange(half) / half)
    axes = torch.tensor([axis for axis, size in enumerate(sections) for _ in range(size)])
    positions = torch.randint(0, 5000, (37, 3))
    args = axes, inv_freq, 1.25, dtype
    expected = rotary_angles_by_axis_reference(positions, *args)
    close: dict[str, Any] = {"atol": 2e-3 if dtype is torch.float16 else 2e-6, "rtol": 1e-3}
    for actual, wanted in zip(rotary_angles_by_axis_triton(positions, *args), expected, strict=True):
        assert actual.shape == (37, 1, 2 * half)
        torch.testing.assert_close(actual, wanted, **close)
    same = positions[:, :1].expand(-1, 3).contiguous()
    plain = rotary_angles_reference(same[:, 0], inv_freq, 1.25, dtype)
    for actual, wanted in zip(rotary_angles_by_axis_reference(same, *args), plain, strict=True):
        assert torch.equal(actual, wanted), "equal positions on all axes are one position"
    assert len(rotary_angles_by_axis_triton(positions[:0], *args)[0]) == 0
    with pytest.raises(AssertionError, match="frequencies"):
        rotary_angles_by_axis_triton(positions, axes[1:], *args[1:])


def test_each_frequency_turns_by_its_axis() -> None:
    rotary = Rotary(RopeConfig(sections=(1, 2, 1)), 8, Placement(torch.float32, torch.device("cpu")))
    positions = torch.tensor([[3, 5, 7]])
    cos, sin = rotary(positions)
    turned = torch.tensor([3.0, 5.0, 5.0, 7.0]) * rotary.inv_freq
    assert torch.allclose(cos[0, 0, :4], turned.cos())
    assert torch.allclose(sin[0, 0, 4:], turned.sin())
