"""Compiled kernels that fuse several steps of a layer, compared with the references of those steps."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.fused_kernels import compare_attention, compare_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
CUDA = "cuda"
SOFTMAX = (False, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dims", "heads", "norm", "window"),
    [((128, 128), (32, 4), True, None), ((128, 32), (16, 2), False, 7), ((80, 80), (4, 4), True, None)],
)
def test_attention(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], norm: bool, window: int | None
) -> None:
    torch.manual_seed(1)
    compare_attention(CUDA, dtype, dims, heads, norm, window)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("counts", "gated", "sizes", "rule"),
    [
        ((128, 8, 0), False, (2048, 768), SOFTMAX),
        ((256, 8, 1), True, (2048, 512), SOFTMAX),
        ((160, 8, 1), False, (512, 96), (True, 8, 4)),
    ],
)
def test_experts(
    tokens: int,
    counts: tuple[int, int, int],
    gated: bool,
    sizes: tuple[int, int],
    rule: tuple[bool, int, int],
) -> None:
    torch.manual_seed(1)
    compare_experts(CUDA, torch.bfloat16, tokens, counts, gated, sizes, rule)
