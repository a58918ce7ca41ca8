"""Gated FP8 products with one accumulator, in Triton's interpreter on the CPU, and when they are chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops import fp8_gated as gated_ops
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_gated import fp8_gated_cuda, fp8_gated_reference, fp8_gated_triton
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.ops.fp8_tiles import Fp8Tiles, choose_fp8_gated_tiles
from common.engine.ops.silu_mul import GATED_REFERENCES
from common.engine.ops.triton_kernel import tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]

LAYER = (28672, 4096)  # gate_up of Llama-3.1-8B
FEW = Fp8Tiles(64, 256, 4, 3, 16, together=2)
SOME = Fp8Tiles(64, 256, 4, 3, 32, bulk=True, together=2)
MANY = Fp8Tiles(128, 256, 8, 3, 64, bulk=True, together=2)
MEASURED = [(1, FEW), (2, FEW), (3, FEW), (15, FEW), (16, FEW), (17, SOME), (33, MANY), (64, MANY)]


def made(rows: int, size: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [rows, depth] and a weight [2 * size, depth], each with its scales."""
    codes, row_scales = quantize_rows_reference(torch.randn(rows, depth))
    return codes, row_scales, (torch.randn(2 * size, depth) / 4).to(FP8), torch.rand(2 * size) / depth**0.5


def expected_of(given: tuple[Tensor, Tensor, Tensor, Tensor], activation: str) -> Tensor:
    codes, row_scales, weight, scales = (each.double() for each in given)
    return GATED_REFERENCES[activation](codes @ weight.T * row_scales * scales)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize(("rows", "tiles"), MEASURED)
def test_gates_are_followed_by_up_projections(
    rows: int, tiles: Fp8Tiles, bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that end inside a tile, so that the last tile of the gates begins the up projections."""
    monkeypatch.setattr(gated_ops, "copies_in_bulk", lambda *matrices: bulk)
    activation = "gelu_tanh" if rows % 2 else "silu"
    for size, depth in ((tiles.columns + 5, 512), (8, 1024)):
        given = made(rows, size, depth)
        found = fp8_gated_triton(*given, tiles._replace(bulk=True), torch.float32, activation)
        torch.testing.assert_close(found.double(), expected_of(given, activation), atol=1e-4, rtol=1e-4)


def test_more_rows_than_a_tile_and_other_numbers_of_steps() -> None:
    """65 rows are two tiles; the depth is three sums, of four steps each."""
    given = made(65, 70, 1536)
    tiles = Fp8Tiles(64, 128, 4, 3, 64, together=4)
    found = fp8_gated_triton(*given, tiles, torch.float32, "silu")
    torch.testing.assert_close(found.double(), expected_of(given, "silu"), atol=1e-4, rtol=1e-4)


def test_nested_rows_with_one_scale_for_all() -> None:
    codes, _, weight, scales = made(6, 24, 512)
    scale = torch.tensor([[0.03]])
    nested = codes.view(2, 3, 512), scale.expand(2, 3, 1), weight, scales
    found = fp8_gated_triton(*nested, FEW, torch.bfloat16, "silu")
    assert (found.shape, found.dtype) == ((2, 3, 24), torch.bfloat16)
    expected = expected_of((codes, scale.expand(6, 1), weight, scales), "silu")
    torch.testing.assert_close(found.double().view(6, 24), expected, atol=1e-3, rtol=2e-2)


def test_a_row_does_not_depend_on_the_batch() -> None:
    codes, row_scales, weight, scales = made(7, 16, 512)
    together = fp8_gated_triton(codes, row_scales, weight, scales, FEW, torch.float32, "silu")
    one = fp8_gated_triton(codes[4:5], row_scales[4:5], weight, scales, FEW, torch.float32, "silu")
    assert torch.equal(one, together[4:5])
    assert fp8_gated_triton(codes[:0], row_scales[:0], weight, scales, FEW, torch.float32, "silu").shape == (
        0,
        16,
    )


def test_a_launcher_checks_its_arguments() -> None:
    codes, row_scales, weight, scales = made(2, 16, 512)
    rest = FEW, torch.float32, "silu"
    with pytest.raises(AssertionError, match="times"):
        fp8_gated_triton(codes.float(), row_scales, weight, scales, *rest)
    with pytest.raises(AssertionError, match="weight scales"):
        fp8_gated_triton(codes, row_scales, weight, scales[:3], *rest)
    with pytest.raises(AssertionError, match="row scales"):
        fp8_gated_triton(codes, row_scales.expand(2, 2), weight, scales, *rest)
    with pytest.raises(AssertionError, match="a depth of 256 cuts a sum"):
        fp8_gated_triton(codes[:, :256], row_scales, weight[:, :256].contiguous(), scales, *rest)


@pytest.mark.parametrize(("rows", "tiles"), MEASURED)
def test_the_measured_tiles_are_chosen(rows: int, tiles: Fp8Tiles) -> None:
    assert choose_fp8_gated_tiles(rows, *LAYER, False, 132) == tiles
    # 70B over two ranks.
    assert choose_fp8_gated_tiles(rows, 28672, 8192, False, 132) == tiles


@pytest.mark.parametrize(
    ("rows", "size", "depth", "blocks", "shared"),
    [
        (65, *LAYER, False, 232_448),
        (128, *LAYER, False, 232_448),
        (16, *LAYER, True, 232_448),
        (16, 28672, 4096 + 256, False, 232_448),
        (16, *LAYER, False, 99 << 10),
        (64, *LAYER, False, 163 << 10),
        (64, 2 * 7168, 8192, False, 232_448),
    ],
)
def test_other_products_keep_two_accumulators(
    rows: int, size: int, depth: int, blocks: bool, shared: int
) -> None:
    """Other rows, scales or GPUs, a depth that cuts a sum, and programs that have a multiprocessor each."""
    found = choose_fp8_gated_tiles(rows, size, depth, blocks, 132, shared)
    assert found is not None
    assert (found.together, found.depth) == (1, 128)
    assert found.shared_bytes(matrices=2) <= shared


@pytest.mark.parametrize("inter", [10_000, 12_672, 16_896, 18_944])
def test_no_program_of_more_columns_waits_for_another(inter: int) -> None:
    """Of 64 rows a multiprocessor holds one program of 128 columns, or two of 64."""
    found = choose_fp8_gated_tiles(64, 2 * inter, 4096, False, 132)
    assert found is not None
    assert found.columns == (128 if 12_672 <= inter <= 16_896 else 64)
    assert found.together == 2


@pytest.mark.parametrize(
    ("rows", "inter", "columns", "stages"),
    [
        (1, 28_672, 64, 2),  # 70B
        (32, 28_672, 64, 2),
        (64, 28_672, 128, 2),
        (16, 25_600, 64, 2),  # Qwen3-32B
        (16, 25_344, 64, 3),  # 396 programs, three per multiprocessor
        (64, 18_944, 64, 2),
        (16, 53_248, 64, 3),  # two turns in any case
    ],
)
def test_programs_that_would_take_two_turns_have_fewer_steps_in_flight(
    rows: int, inter: int, columns: int, stages: int
) -> None:
    found = choose_fp8_gated_tiles(rows, 2 * inter, 8192, False, 132)
    assert found is not None
    assert (found.columns, found.stages, found.together) == (columns, stages, 2)
    assert found.shared_bytes() <= 232_448


@pytest.mark.parametrize("biased", [False, True])
def test_the_operation_serves_them(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias, the product is written before the activation."""
    chosen: list[Fp8Tiles] = []

    def record(*given: object) -> Tensor:
        tiles = given[4]
        assert isinstance(tiles, Fp8Tiles)
        chosen.append(tiles)
        return fp8_gated_triton(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("common.engine.ops.fp8_gated.fp8_gated_triton", record)
    monkeypatch.setattr("common.engine.ops.fp8_gated.multiprocessors", lambda device: 1)
    given = made(3, 136, 512)
    bias = torch.randn(272) if biased else None
    found = fp8_gated_cuda(*given, bias, "silu", torch.bfloat16)
    expected = fp8_gated_reference(*given, bias, "silu", torch.bfloat16)
    wide = [codes.float() * scales for codes, scales in (found, expected)]
    torch.testing.assert_close(wide[0], wide[1], atol=0.05 * float(wide[1].abs().max()), rtol=0.13)
    assert chosen == ([] if biased else [FEW])
