"""Products of a few rows without the matrix units, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common.engine.ops.expert_products import expert_parts_reference
from common.engine.ops.expert_vectors import pair_vectors_triton
from common.engine.ops.route import route_reference, route_triton
from common.engine.ops.triton_kernel import tl
from common.engine.ops.vector_products import MAX_ROWS, VectorTiles, choose_vectors, vector_linear_triton

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 64, 256), (4, 41, 104), (3, 1, 32), (0, 8, 16)])
def test_linear(early: bool, bias: bool, rows: int, size: int, depth: int) -> None:
    """Rows have a stride; sizes and depths are no powers of two."""
    x, weight = torch.randn(rows, depth + 3).half()[:, :depth], torch.randn(size, depth).half() / depth**0.5
    offset = torch.randn(size).half() if bias else None
    expected = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
    tiles = VectorTiles(4, 4, early)
    wide = vector_linear_triton(x, weight, offset, tiles, torch.float32)
    torch.testing.assert_close(wide, expected, atol=1e-4, rtol=1e-4)
    rounded = vector_linear_triton(x, weight, offset, tiles)
    assert torch.equal(rounded, wide.half())


def test_a_launcher_checks_its_arguments() -> None:
    weight = torch.randn(8, 16)
    with pytest.raises(AssertionError, match=f"{MAX_ROWS + 1} rows"):
        vector_linear_triton(torch.randn(MAX_ROWS + 1, 16), weight, None, VectorTiles(4, 4))
    with pytest.raises(AssertionError, match="contiguous"):
        vector_linear_triton(torch.randn(1, 8), weight[:, :8], None, VectorTiles(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 5, 2, 32, 16), (3, 6, 4, 40, 23), (0, 3, 1, 8, 8)],
)
def test_pairs(dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, inner: int) -> None:
    """A pair without an expert is left out, and an expert that nobody chose is not read."""
    x, shares = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, chosen)
    gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
    which = torch.stack([torch.randperm(experts - 1)[:chosen] for _ in range(tokens)] or [torch.zeros(0)])
    which = which.to(torch.int32).view(tokens, chosen)
    which[2:] = -1
    gate_up[-1] = down[-1] = torch.nan
    tiles = VectorTiles(4, 4)
    inside = pair_vectors_triton(x, gate_up, which, shares, True, tiles)
    found = pair_vectors_triton(inside, down, which, shares, False, tiles).view(tokens, chosen, hidden)
    expected = expert_parts_reference(x, gate_up, down, which, shares)
    limit = 4e-3 if dtype == torch.float16 else 5e-6
    torch.testing.assert_close(found[which >= 0], expected[which >= 0], atol=limit, rtol=limit)


def test_only_measured_sizes_are_served() -> None:
    assert choose_vectors(1, 5120, 2048) == choose_vectors(1, 12352, 2048) == VectorTiles(4, 4)
    assert choose_vectors(1, 2048, 4096) == VectorTiles(4, 8)
    # More rows, and larger weights: a Llama-3.1-8B's, an LM head.
    for rows, size, depth in ((2, 5120, 2048), (1, 6144, 4096), (1, 2048, 14336), (1, 151936, 2048)):
        assert choose_vectors(rows, size, depth) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_a_router_chooses_by_unrounded_logits(rows: int) -> None:
    """In 16 bits, by vectors for one row and by parts of the depth for more; the shared gate is no expert."""
    x, weight = torch.randn(rows, 64).half(), torch.randn(13, 64).half() / 4
    given = (x, weight, None, None, 0, 3, 1, True, False, 1, 1, True, 0.0, 1.0)
    (found, shares), (expected, expected_shares) = route_triton(*given), route_reference(*given)
    assert torch.equal(found, expected)
    torch.testing.assert_close(shares, expected_shares, atol=1e-4, rtol=1e-4)
