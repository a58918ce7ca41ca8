"""FP8 products and quantisers on a GPU, compared with their torch references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, GROUP
from common.engine.ops.fp8_experts import fp8_expert_parts_reference
from common.engine.ops.fp8_gated import fp8_gated, fp8_gated_reference
from common.engine.ops.fp8_grouped import (
    choose_grouped_tiles,
    fp8_expert_parts_triton,
    fp8_grouped_triton,
    sum_more_steps,
)
from common.engine.ops.fp8_library import library_product
from common.engine.ops.fp8_linear import (
    fp8_linear,
    fp8_linear_reference,
    fp8_product,
    fp8_product_reference,
)
from common.engine.ops.fp8_linear_norm import (
    fp8_product_norm,
    fp8_product_norm_quantized,
    fp8_product_norm_reference,
)
from common.engine.ops.fp8_rms_norm import (
    fp8_add_rms_norm,
    fp8_add_rms_norm_reference,
    fp8_rms_norm,
    fp8_rms_norm_reference,
)
from common.engine.ops.fp8_rows import (
    quantize_rows,
    quantize_rows_reference,
    quantize_with,
    quantize_with_reference,
)
from common.engine.ops.fp8_silu_mul import fp8_gate, fp8_gate_reference
from common.engine.ops.group_pairs import PairGroups
from common.engine.ops.shared_memory import H200
from common.engine.ops.triton_kernel import cdiv
from tests.fakes.near_codes import assert_near_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
CUDA = "cuda"
BF16 = torch.bfloat16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).to(BF16)


def weight_of(size: int, depth: int, blocks: bool) -> tuple[Tensor, Tensor]:
    shape = (cdiv(size, GROUP), cdiv(depth, GROUP)) if blocks else (size,)
    return normal(size, depth).to(FP8), (torch.rand(shape, device=CUDA) + 0.5) / depth**0.5


def near(found: Tensor, expected: Tensor, limit: float = 0.01) -> None:
    """Compare by the relative error of the whole, and the largest error by the size of the values."""
    error, size = (found.float() - expected.float()), expected.float().pow(2).mean().sqrt()
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert error.pow(2).mean().sqrt() < limit * size
    assert error.abs().max() < 20 * limit * size


def near_in_rows(found: Tensor, expected: Tensor) -> None:
    """Compare each value [..., H] with the size of its row, for sums whose terms may be quantised differently.

    If the largest input of a row is rounded to 16 bits in the other direction, the row has another scale and other
    codes: terms differ by 4 % in the quadratic mean (sqrt(2) times that of rounding to e4m3), and so do their sums.
    Such differences of n sums are at most sqrt(2 ln 2n) times their mean, and uniform scales of columns are at most
    sqrt(3) times theirs. The results' rounding to 16 bits adds 2^-8.
    """
    size = expected.float().pow(2).mean(-1, keepdim=True).sqrt()
    most = math.sqrt(3 * 2 * math.log(2 * expected.numel())) * (0.04 + 2**-8)
    assert ((found.float() - expected.float()).abs() <= most * size).all()


def same_codes(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-9)
    wrong = found[0].float() != expected[0].float()
    # A value may be rounded to 16 bits in the other direction, or its row's scale differ by such a rounding.
    assert wrong.float().mean() < 0.15
    step = (found[0].float() - expected[0].float()).abs() / expected[0].float().abs().clamp(min=2**-6)
    assert step.max() <= 0.126


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (300, 4096), (3, 200)])
def test_quantisers(rows: int, size: int, blocks: bool) -> None:
    x, residual, weight = 3 * normal(rows, size), normal(rows, size), normal(size)
    found, expected = quantize_rows(x, blocks), quantize_rows_reference(x, blocks)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1], expected[1])
    assert found[1].stride() == expected[1].stride()
    scale = torch.full((), 0.02, device=CUDA)
    for one, other in zip(quantize_with(x, scale), quantize_with_reference(x, scale), strict=True):
        assert torch.equal(one.float(), other.float())
    gate_up = normal(rows, 2 * size)
    same_codes(fp8_gate(gate_up, "silu", blocks), fp8_gate_reference(gate_up, "silu", blocks))
    for gain in (weight, weight.float()):
        ours = fp8_rms_norm(x, gain, 1e-5, blocks)
        same_codes(ours, fp8_rms_norm_reference(x, gain, 1e-5, blocks))
        exact = quantize_rows_reference(ours[2], blocks)
        assert torch.equal(ours[0].float(), exact[0].float())
        sums = fp8_add_rms_norm(x, residual, gain, 1e-5, blocks)
        same_codes(sums, fp8_add_rms_norm_reference(x, residual, gain, 1e-5, blocks))
        assert torch.equal(sums[2], x + residual)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 17, 64, 100, 256, 257])
@pytest.mark.parametrize(("size", "depth"), [(6144, 4096), (4096, 14336), (192, 320)])
def test_products(size: int, depth: int, rows: int, blocks: bool) -> None:
    x, (weight, scales), bias = normal(rows, depth), weight_of(size, depth, blocks), normal(size)
    codes, row_scales = quantize_rows(x, blocks)
    given = codes, row_scales, weight, scales
    for offset in (None, bias):
        near(fp8_product(*given, offset, BF16), fp8_product_reference(*given, offset, BF16))
    near(fp8_linear(x, weight, scales, bias), fp8_linear_reference(x, weight, scales, bias))
    residual, gain = normal(rows, size), normal(size)
    expected = fp8_product_norm_reference(*given, bias, residual, gain, 1e-5)
    found = fp8_product_norm(*given, bias, residual, gain, 1e-5)
    ours = fp8_product_norm_quantized(*given, bias, residual, gain, 1e-5, blocks)
    near(found[0], expected[0])
    near(found[1], expected[1])
    assert torch.equal(ours[2], found[1])
    assert torch.equal(ours[0].float(), quantize_rows_reference(found[0], blocks)[0].float())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 257])
@pytest.mark.parametrize("inter", [3584, 14336])
def test_gated_products(inter: int, rows: int, blocks: bool) -> None:
    """Gates and up projections of 14,336 columns and scales per channel have one accumulator up to 64 rows."""
    weight, scales = weight_of(2 * inter, 4096, blocks)
    activation = "gelu_tanh" if rows in (16, 33) else "silu"
    given = (*quantize_rows(normal(rows, 4096), blocks), weight, scales, None, activation, BF16)
    assert_near_codes(fp8_gated(*given), fp8_gated_reference(*given))


@pytest.mark.parametrize(
    ("rows", "blocks", "limit"),
    [
        (16, False, 2e-3),
        (16, True, 2e-3),
        (64, False, 1e-2),
        (64, True, 2e-3),
        (256, False, 0.1),
        (256, True, 1e-2),
    ],
)
def test_a_sum_of_one_sign_loses_little(rows: int, blocks: bool, limit: float) -> None:
    """The matrix units drop bits of long sums: ours add up in parts, the library's (256 rows) less often or never."""
    (weight, scales), x = weight_of(256, 14336, blocks), normal(rows, 14336).abs()
    weight = weight.float().abs().to(FP8)
    given = (*quantize_rows(x, blocks), weight, scales, None, torch.float32)
    found, expected = fp8_product(*given), fp8_product_reference(*given)
    torch.testing.assert_close(found, expected, rtol=limit, atol=0.0)


@pytest.mark.parametrize("blocks", [False, True])
def test_the_library_agrees(blocks: bool) -> None:
    x, (weight, scales) = normal(256, 4096), weight_of(6144, 4096, blocks)
    given = (*quantize_rows(x, blocks), weight, scales, None, BF16)
    found = library_product(*given)
    assert found is not None
    near(found, fp8_product_reference(*given))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    [
        *((tokens, 2048, 768) for tokens in (1, 2, 16, 17, 300, 2000)),
        (4, 2048, 512),  # the depth of four steps together
        (5, 1280, 640),  # sums of two steps, and steps by themselves
        (16, 200, 104),  # no whole steps
    ],
)
def test_experts(tokens: int, hidden: int, inner: int, blocks: bool) -> None:
    """Up to 16 tokens need no groups, and with scales per channel add up several steps."""
    torch.manual_seed(0)
    count, chosen = 32, 4
    within, across = cdiv(inner, GROUP), cdiv(hidden, GROUP)
    gate_up, down = (normal(count, *size).to(FP8) for size in ((2 * inner, hidden), (hidden, inner)))
    of_gates = torch.rand((count, 2, within, across) if blocks else (count, 2 * inner), device=CUDA) / 40
    of_downs = torch.rand((count, across, within) if blocks else (count, hidden), device=CUDA) / 20
    which = torch.rand(tokens, count - 1, device=CUDA).topk(chosen).indices.int()
    which[:, -1] = count - 1  # a shared expert
    which[tokens // 2, 1:] = -1
    if tokens > 2:
        which[1] = -1
    given = normal(tokens, hidden), gate_up, of_gates, down, of_downs, None, which, which.float().abs() / 32
    found, expected = fp8_expert_parts_triton(*given), fp8_expert_parts_reference(*given)
    found, expected = found[which >= 0], expected[which >= 0]
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found.float() - expected.float()).norm() < 0.03 * expected.float().norm()
    near_in_rows(found, expected)


@pytest.mark.parametrize("inner", [512, 768, 2048])
def test_a_sum_of_few_experts_of_one_sign_loses_little(inner: int) -> None:
    tokens, count, hidden = 4, 8, 256
    tiles = choose_grouped_tiles(2 * tokens, count, False, False, H200.shared_bytes)
    tiles = sum_more_steps(tiles, inner, False, H200.shared_bytes)
    assert tiles.together > 1
    which = torch.rand(tokens, count, device=CUDA).topk(2).indices.int()
    codes, row_scales = quantize_rows(normal(2 * tokens, inner).abs())
    down, scales = normal(count, hidden, inner).abs().to(FP8), torch.rand(count, hidden, device=CUDA)
    groups = PairGroups(which.view(-1), which.view(-1, 1))
    given = codes, row_scales, down, scales, torch.ones(tokens, 2, device=CUDA), groups, False, tiles
    found = fp8_grouped_triton(*given, torch.float32)
    chosen = which.view(-1).long()
    expected = (down.double()[chosen] @ codes.double()[:, :, None])[:, :, 0] * row_scales * scales[chosen]
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0.0)
