"""Products of few rows, and the top tokens of a draft head, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops import linear as linear_ops
from common.engine.ops.linear import gated_linear, linear, linear_parts, linear_triton
from common.engine.ops.linear_norm import linear_add_rms_norm
from common.engine.ops.rms_norm import add_parts_rms_norm_triton, add_rms_norm
from common.engine.ops.silu_mul import gelu_mul, silu_mul
from common.engine.ops.tiles import (
    FEW,
    Tiles,
    choose_gated_tiles,
    choose_tiles,
    divide_depth,
    each_division,
    split_rows,
)
from common.engine.ops.top_tokens import top_tokens, top_tokens_triton
from common.engine.ops.triton_kernel import cdiv, tl
from tests.fakes.covering import combinations

TILES = Tiles(16, 128, 4, 3)
H200 = 132  # processors
pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@pytest.fixture(params=["pointers", "descriptions"])
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading tiles: an address per element, and bulk copies as on a Hopper GPU."""
    bulk = request.param == "descriptions"
    monkeypatch.setattr(linear_ops, "copies_in_bulk", lambda *matrices: bulk)


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "depth"), [(1, 64, 256), (5, 40, 104), (16, 96, 512), (0, 32, 64), (3, 1, 32)]
)
def test_linear(dtype: torch.dtype, bias: bool, rows: int, size: int, depth: int) -> None:
    x, weight = torch.randn(rows, depth, dtype=dtype), torch.randn(size, depth, dtype=dtype) / depth**0.5
    offset = torch.randn(size, dtype=dtype) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    limit = 2e-3 if dtype == torch.float16 else 5e-6
    for tiles in (TILES, Tiles(32, 64, 4, 2, 32)):
        out = linear_triton(x, weight, offset, tiles)
        torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)
    assert torch.equal(linear(x, weight, offset), torch.nn.functional.linear(x, weight, offset))


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("rows", [16, 20, 32])
def test_a_second_tile_ends_with_the_last_row(rows: int) -> None:
    """Most of its rows may be in the first tile, too. Memory past the last row is not read."""
    poison = torch.full((rows + 16, 104), torch.nan)
    x, weight = poison[:rows].normal_(), torch.randn(40, 104) / 10
    tiles = Tiles(16, 32, 4, 2, rest=16)
    expected = torch.nn.functional.linear(x, weight, weight[:, 0])
    found = linear_triton(x, weight, weight[:, 0].contiguous(), tiles)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=5e-6)
    gated = linear_triton(x, weight, None, tiles, "silu")
    torch.testing.assert_close(gated, gated_linear(x, weight, None), atol=5e-6, rtol=5e-6)
    parts = linear_parts(x, weight, None, tiles._replace(parts=3))
    torch.testing.assert_close(parts.sum(0), x @ weight.T, atol=5e-6, rtol=5e-6)
    with pytest.raises(AssertionError, match="15 rows, the second tile has 16"):
        linear_triton(x[:15], weight, None, tiles)


def test_each_number_of_rows_is_divided_as_the_least_one_of_its_kind() -> None:
    assert each_division(64) == [1, 2, 17, 33]
    assert each_division(200) == [1, 2, 17, 33, 65, 81, 97, 128, 129]
    for most in (1, 2, 16, 17, 200):
        least = each_division(most)
        assert {split_rows(rows) for rows in range(1, most + 1)} == {split_rows(rows) for rows in least}


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


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 48, 128), (5, 20, 104), (29, 20, 104)])
def test_gated_linear(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    x, weight = torch.randn(rows, depth, dtype=dtype), torch.randn(2 * width, depth, dtype=dtype) / depth**0.5
    tiles = TILES._replace(rows=32 if rows > FEW else FEW)
    limit = 4e-3 if dtype == torch.float16 else 5e-6
    for activation, multiply in (("silu", silu_mul), ("gelu_tanh", gelu_mul)):
        out = linear_triton(x, weight, None, tiles, activation)
        expected = gated_linear(x, weight, None, activation)
        torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
        assert torch.equal(expected, multiply(linear(x, weight, None)))
    with pytest.raises(AssertionError, match="no bias"):
        linear_triton(x, weight, weight[:, 0].contiguous(), tiles, "silu")


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize(
    ("parts", "depth", "shape"),
    # parts are uneven, cut and empty
    combinations((1, 3, 8), (5 * 32 + 8, 5 * 32), ((5, 40), (0, 16), (50, 40))),
)
def test_a_product_in_parts_and_the_norm_that_adds_them_up(
    parts: int, depth: int, shape: tuple[int, int]
) -> None:
    """Memory past x and the weight is not read, whichever parts are left empty."""
    rows, size = shape
    poison = torch.full((max(rows, size) + 8, depth), torch.nan)
    x, weight = poison.clone()[:rows].normal_(), poison.clone()[:size].normal_() / depth**0.5
    residual, gain = torch.randn(rows, size), torch.randn(size)
    tiles = Tiles(16, 32, 4, 2, parts=parts, rows=64 if rows > FEW else FEW)
    made, offset = linear_parts(x, weight, None, tiles), torch.randn(size)
    assert made.shape == (parts, rows, size)
    limit = 5e-6
    expected_sum = x.double() @ weight.double().T
    torch.testing.assert_close(made.double().sum(0), expected_sum, atol=limit, rtol=limit)
    with_bias = linear_parts(x, weight, offset, tiles).double().sum(0)
    torch.testing.assert_close(with_bias, expected_sum + offset.double(), atol=limit, rtol=limit)
    normed, total = add_parts_rms_norm_triton(made, residual, gain, 1e-5)
    summed = made[0].clone()
    for part in made[1:]:
        summed += part
    expected = add_rms_norm(summed, residual, gain, 1e-5)
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
    ("size", "depth", "parts"),
    [
        (4096, 14336, 2),
        (4096, 4096, 2),
        (5120, 17408, 2),
        (3584, 18944, 2),
        (2560, 9728, 3),
        (1536, 8960, 5),
        (1024, 3072, 8),
        (960, 2560, 7),
    ],
)
@pytest.mark.parametrize("rows", [1, 16])
def test_what_ends_a_block_is_divided(rows: int, size: int, depth: int, parts: int) -> None:
    """Into about as many programs as there are processors, or enough that two run on each at once; none is empty."""
    tiles = divide_depth(rows, size, depth, H200)
    assert tiles is not None
    assert tiles.parts == parts
    programs = parts * cdiv(size, tiles.columns)
    assert 0.79 * H200 < programs <= (H200 if size < 5120 else 2 * H200)
    part = cdiv(cdiv(depth, tiles.depth), parts) * tiles.depth
    assert (parts - 1) * part < depth <= parts * part


def test_what_is_wide_or_shallow_or_of_many_rows_is_not_divided() -> None:
    assert divide_depth(1, 8192, 4096, H200) is None
    assert divide_depth(1, 4096, 1024, H200) is None
    assert divide_depth(129, 4096, 14336, H200) is None
    assert divide_depth(128, 4096, 14336, H200) is not None
    assert divide_depth(17, 5120, 17408, H200) is None  # 160 programs: 28 would run after the others


@pytest.mark.parametrize(
    ("rows", "first", "rest"),
    [
        *((1, 16, 0), (16, 16, 0), (17, 32, 0), (33, 64, 0), (64, 64, 0), (65, 64, 16), (80, 64, 16)),
        *((81, 64, 32), (96, 64, 32), (97, 64, 64), (127, 64, 64), (128, 128, 0)),
    ],
)
def test_tiles_hold_their_rows_and_fill_a_processor(rows: int, first: int, rest: int) -> None:
    """Beyond 64 rows a second tile ends with the last row, so that little is copied from past it."""

    def on_the_way(tiles: Tiles, matrices: int) -> int:
        return 2 * (first + rest + matrices * tiles.columns) * tiles.depth * tiles.stages

    tiles, gated = choose_tiles(rows, 6144, H200), choose_gated_tiles(rows, 28672, H200)
    assert tiles is not None
    assert gated is not None
    assert tiles[4::2] == gated[4::2] == (first, rest)
    assert 120_000 <= on_the_way(tiles, 1) <= 227 << 10
    assert 120_000 <= on_the_way(gated, 2) <= 227 << 10


@pytest.mark.parametrize("rows", [1, 32, 64])
def test_of_many_programs_two_share_a_processor(rows: int) -> None:
    tiles = choose_tiles(rows, 128256, H200)
    assert tiles is not None
    assert tiles.at_once(H200) == 2 * H200
    assert tiles.stages >= 3


@pytest.mark.parametrize(
    ("rows", "size", "gated"),
    [
        (1, 4096, False),  # too few programs to saturate the memory
        (1, 2 * 4096, True),
        (129, 6144, False),  # bound by arithmetic
        (129, 28672, True),
        (128, 128256, False),
        (128, 2 * 18944, True),
    ],
)
def test_what_is_left_to_the_library(rows: int, size: int, gated: bool) -> None:
    assert (choose_gated_tiles if gated else choose_tiles)(rows, size, H200) is None


@pytest.mark.parametrize(
    ("rows", "inter", "shared"),
    [
        (64, 17_408, True),  # Qwen3-14B: 272 programs on 132 processors; the last 8 would run by themselves
        (32, 18_944, True),
        (17, 17_920, True),
        (16, 17_408, False),
        (64, 14_336, False),  # two turns
        (64, 24_576, False),  # three turns, of which the last is nearly full
        (64, 25_600, False),  # 400 programs: four turns, and too many for three per processor
    ],
)
def test_gated_programs_of_more_than_two_turns_share_processors(rows: int, inter: int, shared: bool) -> None:
    tiles = choose_gated_tiles(rows, 2 * inter, H200)
    assert tiles is not None
    assert (tiles.depth, tiles.stages) == ((64, 3) if shared else (128, 4))
    assert tiles.at_once(H200, 2) == (3 * H200 if shared else H200)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("rows", "size", "block"), [(3, 200, 64), (1, 64, 4096), (2, 700, 256), (0, 10, 16)])
def test_top_tokens(count: int, rows: int, size: int, block: int) -> None:
    wide = 3 * torch.randn(rows, size + 8)
    logits = wide[:, :size]
    probs, ids = top_tokens_triton(logits, count, block)
    expected, expected_ids = top_tokens(logits, count)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)


# Triton's interpreter computes with numpy, which warns about the broken row.
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
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
