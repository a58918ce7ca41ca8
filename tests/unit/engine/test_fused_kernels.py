"""Kernels that fuse several steps of a layer, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.triton_kernel import tl
from tests.fakes.fused_kernels import compare_attention, compare_experts

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
CPU = "cpu"
SOFTMAX = (False, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "dims", "heads", "norm", "window"),
    [
        (torch.float32, (32, 32), (4, 2), True, None),
        (torch.float16, (24, 8), (6, 1), False, 7),
        (torch.float32, (40, 40), (4, 4), True, None),
    ],
)
def test_attention(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], norm: bool, window: int | None
) -> None:
    """Whole and partial rotations; heads of a size that is no power of two."""
    compare_attention(CPU, dtype, dims, heads, norm, window)


@pytest.mark.parametrize("window", [None, 17, 1])
@pytest.mark.parametrize("tokens", [(33, 1), (32, 2), (17, 16), (76, 75)])
def test_the_new_key_may_be_anywhere_in_its_part(tokens: tuple[int, int], window: int | None) -> None:
    """Parts of 16 or 32 keys, of which the new key may be the only one."""
    compare_attention(CPU, torch.float32, (16, 16), (4, 2), False, window, tokens)


@pytest.mark.parametrize(
    ("tokens", "counts", "gated", "sizes", "rule"),
    [
        (1, (5, 2, 0), False, (32, 16), SOFTMAX),
        (3, (12, 4, 1), True, (40, 23), SOFTMAX),
        (2, (16, 6, 2), False, (24, 8), (True, 4, 2)),
    ],
)
def test_experts(
    tokens: int,
    counts: tuple[int, int, int],
    gated: bool,
    sizes: tuple[int, int],
    rule: tuple[bool, int, int],
) -> None:
    compare_experts(CPU, torch.float16, tokens, counts, gated, sizes, rule)
