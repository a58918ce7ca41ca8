"""FP8 products: quantised rows, scales of both schemes, and what is independent of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.fp8_gated import fp8_gated
from common.engine.ops.fp8_linear import FP8, MAX_CODE, fp8_linear, fp8_product, quantize_rows, values_of
from common.engine.ops.fp8_linear_norm import fp8_product_norm, fp8_product_norm_quantized
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm
from common.engine.ops.fp8_silu_mul import fp8_gate
from common.engine.ops.fp8_tiles import choose_fp8_gated_tiles, choose_fp8_tiles, divide_fp8_depth
from common.engine.ops.rms_norm import add_rms_norm
from common.engine.ops.silu_mul import GATED_OPS

DEPTH, SIZE = 200, 150


def weight_of(blocks: bool) -> tuple[Tensor, Tensor]:
    codes = torch.randn(SIZE, DEPTH).to(FP8)
    return codes, torch.rand((2, 2) if blocks else (SIZE,)) + 0.5


@pytest.mark.parametrize(("blocks", "groups"), [(False, 1), (True, 2)])
def test_quantised_rows_are_near_their_values(blocks: bool, groups: int) -> None:
    x = torch.randn(2, 3, DEPTH)
    x[0, 0] = 0.0
    codes, scales = quantize_rows(x, blocks)
    assert (codes.dtype, scales.shape) == (FP8, (2, 3, groups))
    wide = scales.repeat_interleave(128, -1)[..., :DEPTH] if blocks else scales
    torch.testing.assert_close(codes.float() * wide, x, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    assert codes[0, 0].float().abs().max() == 0


def test_the_largest_magnitude_of_a_group_is_the_largest_code() -> None:
    x = torch.randn(4, DEPTH)
    codes, scales = quantize_rows(x, True)
    highest = codes.float().abs()
    assert highest[:, :128].amax(-1).tolist() == highest[:, 128:].amax(-1).tolist() == [MAX_CODE] * 4
    torch.testing.assert_close(scales[:, 1] * MAX_CODE, x[:, 128:].abs().amax(-1))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_product_applies_all_scales(blocks: bool, biased: bool) -> None:
    (weight, scales), x = weight_of(blocks), torch.randn(5, DEPTH)
    bias = torch.randn(SIZE) if biased else None
    codes, row_scales = quantize_rows(x, blocks)
    wide = row_scales.repeat_interleave(128, -1)[..., :DEPTH] if blocks else row_scales
    expected = (codes.float() * wide) @ values_of(weight, scales).T + (0.0 if bias is None else bias)
    torch.testing.assert_close(fp8_linear(x, weight, scales, bias), expected, rtol=1e-5, atol=1e-4)
    found = fp8_product(codes, row_scales, weight, scales, bias, torch.float32)
    assert torch.equal(found, fp8_linear(x, weight, scales, bias))
    half = fp8_product(codes, row_scales, weight, scales, None, torch.bfloat16)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("blocks", [False, True])
def test_a_rows_codes_do_not_depend_on_the_batch(blocks: bool) -> None:
    x = torch.randn(6, DEPTH)
    all_codes, all_scales = quantize_rows(x, blocks)
    codes, scales = quantize_rows(x[2:3], blocks)
    assert torch.equal(codes.float(), all_codes[2:3].float())
    assert torch.equal(scales, all_scales[2:3])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_are_quantised_after_the_activation(activation: str, blocks: bool) -> None:
    gate_up = torch.randn(3, 2 * DEPTH)
    codes, scales = fp8_gate(gate_up, activation, blocks)
    expected = quantize_rows(GATED_OPS[activation](gate_up), blocks)
    assert torch.equal(codes.float(), expected[0].float())
    assert torch.equal(scales, expected[1])


@pytest.mark.parametrize("blocks", [False, True])
def test_the_normed_stream_is_quantised(blocks: bool) -> None:
    x, residual, weight = torch.randn(3, DEPTH), torch.randn(3, DEPTH), torch.randn(DEPTH)
    codes, scales, total = fp8_add_rms_norm(x, residual, weight, 1e-5, blocks)
    normed, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    expected = quantize_rows(normed, blocks)
    assert torch.equal(codes.float(), expected[0].float())
    assert torch.equal(scales, expected[1])
    assert torch.equal(total, expected_total)


@pytest.mark.parametrize("blocks", [False, True])
def test_fused_operations_are_one_after_the_other(blocks: bool) -> None:
    codes, row_scales = quantize_rows(torch.randn(3, DEPTH), blocks)
    given = codes, row_scales, *weight_of(blocks), None
    product = fp8_product(*given, torch.float32)
    for one, other in zip(
        fp8_gated(*given, "gelu_tanh", torch.float32), fp8_gate(product, "gelu_tanh", blocks), strict=True
    ):
        assert torch.equal(one.float(), other.float())
    stream, gain = torch.randn(3, SIZE), torch.randn(SIZE)
    normed = add_rms_norm(product, stream, gain, 1e-5)
    for one, other in zip(fp8_product_norm(*given, stream, gain, 1e-5), normed, strict=True):
        assert torch.equal(one, other)
    found = fp8_product_norm_quantized(*given, stream, gain, 1e-5, blocks)
    for one, other in zip(found, fp8_add_rms_norm(product, stream, gain, 1e-5, blocks), strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("shared", [227 << 10, 99 << 10])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128])
def test_tiles_hold_their_rows_and_fit_the_shared_memory(rows: int, blocks: bool, shared: int) -> None:
    for size in (4096, 6144, 28672):
        tiles = choose_fp8_tiles(rows, size, blocks, 132, shared)
        assert tiles.rows >= rows
        assert tiles.stages >= 2
        assert tiles.shared_bytes() <= shared
        assert (tiles.depth, tiles.together) == (128, 1) or not blocks
    gated, divided = (
        choose_fp8_gated_tiles(rows, 28672, 4096, blocks, 132, shared),
        divide_fp8_depth(rows, 4096, 14336, blocks, 132, shared),
    )
    assert (gated is None) == (divided is None) == (blocks and rows > 64)
    if gated is not None and divided is not None:
        one_accumulator = not blocks and rows <= 64 and shared == 227 << 10
        assert gated.together == (2 if one_accumulator else 1)
        assert gated.shared_bytes(1 if one_accumulator else 2) <= shared
        assert gated.rows >= rows
        assert divided.together == (1 if blocks or rows <= 16 else 512 // divided.depth)
        assert divided.parts >= 2
        assert 3 * divided.parts * 4096 // divided.columns >= 2 * 132


def test_products_that_are_wide_or_shallow_are_not_divided() -> None:
    assert divide_fp8_depth(1, 28672, 4096, False, 132) is None
    assert divide_fp8_depth(1, 4096, 512, False, 132) is None
