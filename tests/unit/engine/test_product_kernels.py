"""Products of few rows, and the likeliest tokens of a draft head, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.linear import (
    FEW,
    Tiles,
    choose_gated_tiles,
    choose_tiles,
    gated_linear,
    linear,
    linear_parts,
    linear_triton,
)
from common.engine.ops.linear_norm import divide_depth, linear_add_rms_norm
from common.engine.ops.rms_norm import add_parts_rms_norm_triton, add_rms_norm
from common.engine.ops.silu_mul import silu_mul
from common.engine.ops.top_tokens import top_tokens, top_tokens_triton
from common.engine.ops.triton_kernel import cdiv, tl

TILES = Tiles(16, 128, 4, 3, 128)
pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "depth"), [(1, 64, 256), (5, 40, 100), (16, 96, 512), (0, 32, 64), (3, 1, 32)]
)
def test_linear(dtype: torch.dtype, bias: bool, rows: int, size: int, depth: int) -> None:
    x, weight = torch.randn(rows, depth, dtype=dtype), torch.randn(size, depth, dtype=dtype) / depth**0.5
    offset = torch.randn(size, dtype=dtype) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    limit = 2e-3 if dtype == torch.float16 else 5e-6
    for tiles in (TILES, Tiles(16, 64, 4, 2, 64)):
        out = linear_triton(x, weight, offset, tiles)
        torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)
    assert torch.equal(linear(x, weight, offset), torch.nn.functional.linear(x, weight, offset))


def test_a_row_does_not_depend_on_its_company() -> None:
    x, weight = torch.randn(7, 96, dtype=torch.float16), torch.randn(48, 96, dtype=torch.float16)
    together = linear_triton(x, weight, None, TILES)
    for row in range(7):
        assert torch.equal(linear_triton(x[row : row + 1], weight, None, TILES), together[row : row + 1])


def test_linear_of_strided_and_of_nested_rows() -> None:
    wide, weight = torch.randn(2, 3, 80), torch.randn(16, 48)
    out = linear_triton(wide[:, :, 16:64], weight, None, TILES)
    torch.testing.assert_close(out, wide[:, :, 16:64] @ weight.T, atol=5e-5, rtol=1e-5)


def test_linear_refuses_what_a_tile_cannot_hold() -> None:
    with pytest.raises(AssertionError, match="17 rows"):
        linear_triton(torch.randn(FEW + 1, 32), torch.randn(16, 32), None, TILES)
    with pytest.raises(AssertionError, match="contiguous"):
        linear_triton(torch.randn(1, 32), torch.randn(32, 16).T, None, TILES)
    with pytest.raises(AssertionError, match="times"):
        linear_triton(torch.randn(1, 32), torch.randn(16, 32).half(), None, TILES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 48, 128), (5, 20, 100), (29, 20, 100)])
def test_gated_linear(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    x, weight = torch.randn(rows, depth, dtype=dtype), torch.randn(2 * width, depth, dtype=dtype) / depth**0.5
    tiles = TILES._replace(rows=32 if rows > FEW else FEW)
    out = linear_triton(x, weight, None, tiles, gated=True)
    limit = 4e-3 if dtype == torch.float16 else 5e-6
    torch.testing.assert_close(out, gated_linear(x, weight, None), atol=limit, rtol=limit)
    assert torch.equal(gated_linear(x, weight, None), silu_mul(linear(x, weight, None)))
    with pytest.raises(AssertionError, match="no bias"):
        linear_triton(x, weight, weight[:, 0].contiguous(), tiles, gated=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("depth", [5 * 32 + 7, 5 * 32])  # parts are uneven, cut and empty
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 40), (0, 16), (50, 40)])
def test_a_product_in_parts_and_the_norm_that_adds_them_up(
    dtype: torch.dtype, parts: int, depth: int, rows: int, size: int
) -> None:
    """What lies behind x and the weight is not read, whatever parts are left empty."""
    poison = torch.full((max(rows, size) + 8, depth), torch.nan, dtype=dtype)
    x, weight = poison.clone()[:rows].normal_(), poison.clone()[:size].normal_() / depth**0.5
    residual, gain = torch.randn(rows, size, dtype=dtype), torch.randn(size, dtype=dtype)
    made = linear_parts(x, weight, Tiles(16, 32, 4, 2, parts=parts, rows=64 if rows > FEW else FEW))
    assert made.shape == (parts, rows, size)
    limit = 4e-3 if dtype == torch.float16 else 5e-6
    torch.testing.assert_close(made.double().sum(0), x.double() @ weight.double().T, atol=limit, rtol=limit)
    normed, total = add_parts_rms_norm_triton(made, residual, gain, 1e-5)
    summed = made[0].clone()
    for part in made[1:]:
        summed += part
    expected = add_rms_norm(summed.to(dtype), residual, gain, 1e-5)
    assert torch.equal(total, expected[1])
    torch.testing.assert_close(normed, expected[0], atol=limit, rtol=limit)


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_of_a_product_with_its_norm_is_one_after_the_other(bias: bool) -> None:
    x, weight, residual, gain = torch.randn(3, 24), torch.randn(8, 24), torch.randn(3, 8), torch.randn(8)
    offset = torch.randn(8) if bias else None
    found = linear_add_rms_norm(x, weight, offset, residual, gain, 1e-5)
    expected = add_rms_norm(linear(x, weight, offset), residual, gain, 1e-5)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "depth"), [(4096, 4096), (4096, 14336), (3584, 18944), (2048, 8192), (8192, 28672)]
)
@pytest.mark.parametrize("rows", [1, 16])
def test_what_ends_a_block_is_divided(rows: int, size: int, depth: int) -> None:
    """Into as many programs as run at once, and hardly fewer: all of the memory is busy, and none comes last."""
    tiles = divide_depth(rows, size, depth, 132)
    assert tiles is not None
    assert 132 < tiles.parts * -(-size // tiles.columns) <= 264
    assert rows <= tiles.rows


@pytest.mark.parametrize(
    ("size", "depth", "parts"),
    [(1024, 3072, 6), (1536, 8960, 7), (960, 2560, 5), (4096, 14336, 4), (4096, 4096, 2), (3584, 18944, 4)],
)
def test_no_part_is_empty(size: int, depth: int, parts: int) -> None:
    """Models whose depth is no multiple: Qwen3-0.6B, Qwen2.5-1.5B, SmolLM2-360M, and some whose is."""
    tiles = divide_depth(1, size, depth, 132)
    assert tiles is not None
    assert tiles.parts == parts
    part = cdiv(cdiv(depth, tiles.depth), parts) * tiles.depth
    assert (parts - 1) * part < depth <= parts * part


@pytest.mark.parametrize(
    ("rows", "depth", "divided"),
    [(17, 14336, False), (33, 14336, True), (64, 14336, True), (65, 14336, False), (64, 4096, False)],
)
def test_more_rows_are_divided_where_it_pays(rows: int, depth: int, divided: bool) -> None:
    tiles = divide_depth(rows, 4096, depth, 132)
    assert (tiles is not None) == divided
    assert tiles is None or (tiles.rows >= rows and tiles.parts * 4096 // tiles.columns <= 132)


def test_what_is_wide_or_shallow_is_not_divided() -> None:
    assert divide_depth(1, 16384, 4096, 132) is None
    assert divide_depth(1, 4096, 1024, 132) is None


@pytest.mark.parametrize("size", [16384, 28672, 128256])
def test_wide_matrices_have_tiles_and_narrow_ones_have_none(size: int) -> None:
    for rows, choose in (
        (1, choose_tiles),
        (16, choose_tiles),
        (16, choose_gated_tiles),
        (32, choose_gated_tiles),
    ):
        tiles = choose(rows, size)
        assert tiles is not None
        assert all(number & (number - 1) == 0 for number in tiles[:3])
        assert rows <= tiles.rows
        assert choose(rows, size // 8) is None
    assert choose_tiles(17, size) is None
    assert choose_gated_tiles(33, size) is None


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("rows", "size", "block"), [(3, 200, 64), (1, 64, 4096), (2, 700, 256), (0, 10, 16)])
def test_top_tokens(count: int, rows: int, size: int, block: int) -> None:
    wide = 3 * torch.randn(rows, size + 8)
    logits = wide[:, :size]
    probs, ids = top_tokens_triton(logits, count, block)
    expected, expected_ids = top_tokens(logits, count)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's opinion of the broken row
def test_top_tokens_of_equal_and_of_broken_logits() -> None:
    logits = torch.zeros(3, 100)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[2, 70] = 1.0
    probs, ids = top_tokens_triton(logits, 3, 32)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(probs[0], torch.full((3,), 0.01))
    assert ((ids >= 0) & (ids < 100)).all()
    assert (ids[2].tolist(), probs[2].tolist()) == ([70, 0, 1], [1.0, 0.0, 0.0])
