"""FP8 products of one row without the matrix units, in Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.ops import fp8_gated, fp8_linear, fp8_linear_norm
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_linear import fp8_product_reference
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.ops.fp8_vectors import Fp8Vectors, choose_fp8_vectors, fp8_vector_triton
from common.engine.ops.silu_mul import GATED_REFERENCES
from common.engine.ops.triton_kernel import cdiv, tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
VECTORS = [Fp8Vectors(2, 4), Fp8Vectors(4, 4)]  # those that are served


def made(size: int, depth: int, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return a weight with scales that differ, and mask errors would show: no scale is near another."""
    shape = (cdiv(size, 128), cdiv(depth, 128)) if blocks else (size,)
    return (torch.randn(size, depth) * 3).to(FP8), (torch.rand(shape) + 0.5) / depth**0.5


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "depth"), [(64, 256), (41, 304), (1, 32), (260, 640)])
@pytest.mark.parametrize("vectors", VECTORS)
def test_product(vectors: Fp8Vectors, size: int, depth: int, bias: bool, blocks: bool) -> None:
    """Sizes and depths are no powers of two; the row has a leading axis of one."""
    weight, scales = made(size, depth, blocks)
    offset = torch.randn(size) if bias else None
    given = quantize_rows_reference(torch.randn(1, 1, depth), blocks)
    found = fp8_vector_triton(*given, weight, scales, offset, vectors, torch.float32)
    expected = fp8_product_reference(*given, weight, scales, offset, torch.float32)
    assert found.shape == (1, 1, size)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("vectors", VECTORS)
def test_gated(vectors: Fp8Vectors, activation: str, blocks: bool) -> None:
    """Gates end inside a block of scales, and up projections begin there."""
    inner, depth = 196, 384
    weight, scales = made(2 * inner, depth, blocks)
    given = quantize_rows_reference(torch.randn(1, depth), blocks)
    found = fp8_vector_triton(*given, weight, scales, None, vectors, torch.float32, activation)
    gate_up = fp8_product_reference(*given, weight, scales, None, torch.float32)
    expected = GATED_REFERENCES[activation](gate_up)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_only_single_rows_of_measured_sizes_are_served() -> None:
    """The products of the 8B shape: qkv, attention's output, gate and up, and down."""
    assert choose_fp8_vectors(1, 6144, 4096) == (2, 4)
    assert choose_fp8_vectors(1, 4096, 4096) == (4, 4)
    assert choose_fp8_vectors(1, 28672, 4096, gated=True) == (2, 4)
    assert choose_fp8_vectors(1, 4096, 14336) is None
    assert choose_fp8_vectors(2, 6144, 4096) is None
    assert choose_fp8_vectors(1, 512, 4096) is None
    assert choose_fp8_vectors(1, 2 * 4097, 4096, gated=True) is None


def test_a_launcher_checks_its_arguments() -> None:
    weight, scales = made(8, 256, True)
    rows = quantize_rows_reference(torch.randn(2, 256), True)
    with pytest.raises(AssertionError, match="one row"):
        fp8_vector_triton(*rows, weight, scales, None, VECTORS[0], torch.float32)
    codes, row_scales = quantize_rows_reference(torch.randn(1, 256), False)
    with pytest.raises(AssertionError, match="row scales"):
        fp8_vector_triton(codes, row_scales, weight, scales, None, VECTORS[0], torch.float32)
    with pytest.raises(AssertionError, match=r"torch\.float32"):
        fp8_vector_triton(codes.float(), row_scales, weight, scales, None, VECTORS[0], torch.float32)


def test_products_of_a_served_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the 8B shape: qkv, attention's output with the norm that follows, and gates with up projections."""
    served: list[tuple[int, int, Fp8Vectors]] = []

    def record(codes: Tensor, row_scales: Tensor, weight: Tensor, *given: Any) -> Tensor:
        vectors, dtype, *activation = given[2:]
        served.append((*weight.shape, vectors))
        return torch.zeros(1, len(weight) // (2 if any(activation) else 1), dtype=dtype)

    for module in (fp8_linear, fp8_gated):
        monkeypatch.setattr(module, "fp8_vector_triton", record)
    codes, row_scales = torch.zeros(1, 4096).to(FP8), torch.ones(1, 1)
    weights = {size: torch.empty(size, 4096, dtype=FP8) for size in (6144, 4096, 28672)}
    given = {size: (codes, row_scales, weight, torch.ones(size), None) for size, weight in weights.items()}
    stream = torch.zeros(1, 4096)
    fp8_linear.fp8_product_cuda(*given[6144], torch.float32)
    fp8_linear_norm.fp8_product_norm_quantized_cuda(*given[4096], stream, torch.ones(4096), 1e-5, False)
    fp8_gated.fp8_gated_cuda(*given[28672], "silu", torch.float32)
    assert served == [(6144, 4096, (2, 4)), (4096, 4096, (4, 4)), (28672, 4096, (2, 4))]
