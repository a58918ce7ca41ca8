"""Products of FP8 weights and what quantises their inputs, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops import fp8_product as product_ops
from common.engine.ops.fp8_codes import FP8, decode, encode
from common.engine.ops.fp8_product import fp8_product_parts, fp8_product_triton
from common.engine.ops.fp8_rms_norm import (
    fp8_add_parts_rms_norm_triton,
    fp8_add_rms_norm_reference,
    fp8_add_rms_norm_triton,
    fp8_rms_norm_reference,
    fp8_rms_norm_triton,
)
from common.engine.ops.fp8_rows import (
    quantize_rows_reference,
    quantize_rows_triton,
    quantize_with_reference,
    quantize_with_triton,
)
from common.engine.ops.fp8_silu_mul import fp8_gate_reference, fp8_gate_triton
from common.engine.ops.fp8_tiles import Fp8Tiles
from common.engine.ops.rms_norm import rms_norm_reference
from common.engine.ops.silu_mul import GATED_REFERENCES
from common.engine.ops.triton_kernel import cdiv, full_tile, kernel, tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@kernel
def _convert_kernel(x_ptr, codes_ptr, values_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    codes = encode(tl.load(x_ptr + place), False)
    tl.store(codes_ptr + place, codes)
    tl.store(values_ptr + place, decode(codes))


def test_conversions_are_those_of_torch() -> None:
    """Every code, the midpoints between them, their neighbours, and what is too large or too small."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    known = values[values.isfinite()].unique()
    middles = (known[1:] + known[:-1]) / 2
    edges = torch.cat([known, middles, torch.tensor([1e-30, -1e-9, 460.0, -1e9, torch.inf])])
    x = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(-1e38))])
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    codes, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048, dtype=torch.float16)
    _convert_kernel[(1,)](x, codes, back, 2048)
    expected = x.clamp(-448, 448).to(FP8)
    assert torch.equal(codes.view(FP8).float(), expected.float())
    assert torch.equal(back.float(), expected.float())
    _convert_kernel[(1,)](torch.full((2048,), torch.nan), codes, back, 2048)
    assert codes.view(FP8).float().isnan().all()


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dense: Tensor) -> None:
    """Compare codes, scales and whatever else is returned.

    Args:
        dense: what the reference quantised. The kernel may have rounded its values to a neighbour in float16, so
            its codes are those of some values that close, divided by the kernel's own scales.
    """
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        if one.dtype != FP8:
            torch.testing.assert_close(one, other, atol=0 if other is expected[1] else 2e-3, rtol=2e-3)
    codes, scales = found[0].float(), found[1]
    size = dense.shape[-1]
    wide = scales.repeat_interleave(128, -1)[..., :size] if scales.shape[-1] > 1 else scales
    value, near = dense.float() / wide, dense.float().abs() * 2**-9 / wide
    for lower, upper in ((value - near, codes), (codes, value + near)):
        assert (as_code(lower) <= as_code(upper)).all()


def as_code(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(FP8).float()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [(3, 256), (2, 2, 300), (1, 40), (0, 128)])
def test_quantisers(shape: tuple[int, ...], blocks: bool) -> None:
    wide = torch.randn(*shape[:-1], 2 * shape[-1] + 8).half()
    wide[..., -20:] *= 30
    x = wide[..., 4 : 4 + shape[-1]]
    found = quantize_rows_triton(x, blocks)
    expected = quantize_rows_reference(x, blocks)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1], expected[1])
    gate_up = wide[..., : 2 * shape[-1]]
    for activation in ("silu", "gelu_tanh"):
        same(
            fp8_gate_triton(gate_up, activation, blocks),
            fp8_gate_reference(gate_up, activation, blocks),
            GATED_REFERENCES[activation](gate_up),
        )
    gain, residual = torch.randn(shape[-1]), torch.randn(shape).half()
    for weight in (gain.half(), gain):
        same(
            fp8_rms_norm_triton(x, weight, 1e-5, blocks),
            fp8_rms_norm_reference(x, weight, 1e-5, blocks),
            rms_norm_reference(x, weight, 1e-5),
        )
        same(
            fp8_add_rms_norm_triton(x, residual, weight, 1e-5, blocks),
            fp8_add_rms_norm_reference(x, residual, weight, 1e-5, blocks),
            rms_norm_reference(x + residual, weight, 1e-5),
        )
    parts = torch.randn(3, torch.Size(shape[:-1]).numel(), shape[-1])
    total = (parts[0] + parts[1] + parts[2]).half().view(shape)
    same(
        fp8_add_parts_rms_norm_triton(parts, residual, gain.half(), 1e-5, blocks),
        fp8_add_rms_norm_reference(total, residual, gain.half(), 1e-5, blocks),
        rms_norm_reference(total + residual, gain.half(), 1e-5),
    )


def test_a_given_scale() -> None:
    x = 40 * torch.randn(2, 3, 308).half()[..., 4:304]
    x[0, 0, 0] = 5000.0
    scale = torch.tensor(0.03)
    codes, scales = quantize_with_triton(x, scale)
    expected, rows = quantize_with_reference(x, scale)
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, rows)


def test_a_row_of_zeros_has_codes_of_zero() -> None:
    codes, scales = quantize_rows_triton(torch.zeros(2, 256).half(), True)
    assert not codes.float().any()
    assert (scales > 0).all()


def quantised(size: int, depth: int, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return a weight [size, depth] and its scales, per output column or per block."""
    weight = (torch.randn(size, depth) / 4).to(FP8)
    shape = (cdiv(size, 128), cdiv(depth, 128)) if blocks else (size,)
    return weight, torch.rand(shape) / depth**0.5 + 0.01


def product(codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the product in float64."""
    if scales.ndim == 1:
        return codes.double() @ weight.double().T * row_scales.double() * scales.double()
    size, depth = weight.shape
    rows = codes.double() * row_scales.double().repeat_interleave(128, 1)[:, :depth]
    wide = scales.double().repeat_interleave(128, 0)[:size].repeat_interleave(128, 1)[:, :depth]
    return rows @ (weight.double() * wide).T


@pytest.fixture(params=["pointers", "descriptions", "decoded"])
def _reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of reading tiles: an address per element, bulk copies of a Hopper GPU, and bytes for older GPUs."""
    monkeypatch.setattr(product_ops, "copies_in_bulk", lambda *matrices: request.param == "descriptions")
    monkeypatch.setattr(product_ops, "has_fp8", lambda device: request.param != "decoded")


@pytest.mark.usefixtures("_reads")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "depth"), [(1, 64, 256), (5, 140, 304), (17, 128, 128), (0, 32, 64)]
)
def test_products(rows: int, size: int, depth: int, blocks: bool) -> None:
    codes, row_scales = quantize_rows_reference(torch.randn(rows, depth), blocks)
    weight, scales = quantised(size, depth, blocks)
    expected, bias = product(codes, row_scales, weight, scales), torch.randn(size)
    tiles = Fp8Tiles(64, 128, 4, 3, 16, bulk=True)
    given = codes, row_scales, weight, scales
    found = fp8_product_triton(*given, bias, tiles, torch.float32)
    torch.testing.assert_close(found.double(), expected + bias.double(), atol=1e-5, rtol=1e-5)
    parts = fp8_product_parts(*given, None, tiles._replace(parts=5))
    assert parts.shape == (5, rows, size)
    torch.testing.assert_close(parts.double().sum(0), expected, atol=1e-5, rtol=1e-5)
    if not blocks:
        found = fp8_product_triton(*given, bias, tiles._replace(together=2), torch.float32)
        torch.testing.assert_close(found.double(), expected + bias.double(), atol=1e-5, rtol=1e-5)
        parts = fp8_product_parts(*given, None, tiles._replace(parts=2, together=2))
        torch.testing.assert_close(parts.double().sum(0), expected, atol=1e-5, rtol=1e-5)
    activation = "gelu_tanh" if rows == 5 else "silu"
    found = fp8_product_triton(*given, None, tiles, torch.float32, activation)
    torch.testing.assert_close(found.double(), GATED_REFERENCES[activation](expected), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_reads")
def test_rows_past_the_last_one_have_no_effect() -> None:
    """Codes are followed by others up to a whole tile, which bulk copies read, too."""
    codes, row_scales = quantize_rows_triton(torch.randn(20, 256))
    tile = full_tile(codes, 32)
    assert tile.shape == (32, 256)
    assert full_tile(codes[:, :128], 64).shape == (32, 128)
    assert full_tile(codes.clone(), 32).shape == full_tile(codes, 16).shape == codes.shape
    tile[20:].view(torch.uint8).fill_(0x7F)  # NaN
    weight, scales = quantised(64, 256, False)
    tiles = Fp8Tiles(64, 128, 4, 3, 32, bulk=True)
    found = fp8_product_triton(codes, row_scales, weight, scales, None, tiles, torch.float32)
    expected = product(codes, row_scales, weight, scales)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_reads")
def test_a_product_of_nested_rows() -> None:
    codes, row_scales = quantize_rows_reference(torch.randn(2, 3, 256), True)
    weight, scales = quantised(64, 256, True)
    found = fp8_product_triton(
        codes, row_scales, weight, scales, None, Fp8Tiles(64, 128, 4, 3, bulk=True), torch.float32
    )
    expected = product(codes.view(6, 256), row_scales.reshape(6, 2), weight, scales)
    torch.testing.assert_close(found.double().view(6, 64), expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_company() -> None:
    codes, row_scales = quantize_rows_reference(torch.randn(7, 384), False)
    weight, scales = quantised(64, 384, False)
    tiles = Fp8Tiles(64, 128, 4, 3)
    together = fp8_product_triton(codes, row_scales, weight, scales, None, tiles, torch.float32)
    for row in range(7):
        one = slice(row, row + 1)
        found = fp8_product_triton(codes[one], row_scales[one], weight, scales, None, tiles, torch.float32)
        assert torch.equal(found, together[one])


def test_a_launcher_checks_its_arguments() -> None:
    codes, row_scales = quantize_rows_reference(torch.randn(2, 256), False)
    weight, scales = quantised(64, 256, False)
    tiles = Fp8Tiles(64, 128, 4, 3)
    with pytest.raises(AssertionError, match="times"):
        fp8_product_triton(codes.float(), row_scales, weight, scales, None, tiles, torch.float32)
    with pytest.raises(AssertionError, match="weight scales"):
        fp8_product_triton(codes, row_scales, weight, scales[:3], None, tiles, torch.float32)
    with pytest.raises(AssertionError, match="row scales"):
        fp8_product_triton(codes, row_scales.expand(2, 2), weight, scales, None, tiles, torch.float32)
    blocks = quantize_rows_reference(torch.randn(2, 256), True)
    with pytest.raises(AssertionError, match="depth of a block"):
        fp8_product_triton(*blocks, *quantised(64, 256, True), None, Fp8Tiles(64, 256, 4, 3), torch.float32)
