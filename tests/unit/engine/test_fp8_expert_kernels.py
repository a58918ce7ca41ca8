"""Products of experts with FP8 weights, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_experts import fp8_expert_parts_reference
from common.engine.ops.fp8_grouped import fp8_expert_parts_triton
from common.engine.ops.triton_kernel import cdiv, tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


# Inner values of pairs without an expert are undefined, and quantised like the others.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(("blocks", "static"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 3, 2, 48, 32), (18, 2, 2, 136, 40), (0, 3, 1, 128, 128)],
)
def test_pairs(
    tokens: int, experts: int, chosen: int, hidden: int, inner: int, blocks: bool, static: bool
) -> None:
    """Sizes are no multiples of a block; a pair without an expert is left out."""
    x, shares = torch.randn(tokens, hidden).half(), torch.rand(tokens, chosen)
    which = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)] or [torch.zeros(0)])
    which = which.to(torch.int32).view(tokens, chosen)
    which[2:3, 0] = -1
    gate_up = torch.randn(experts, 2 * inner, hidden).to(FP8)
    down = torch.randn(experts, hidden, inner).to(FP8)
    within, across = cdiv(inner, 128), cdiv(hidden, 128)
    of_gates = torch.rand((experts, 2, within, across) if blocks else (experts, 2 * inner)) / 8
    of_downs = torch.rand((experts, across, within) if blocks else (experts, hidden)) / 8
    given = torch.tensor([0.01, 0.02]) if static else None
    arguments = x, gate_up, of_gates, down, of_downs, given, which, shares
    found, expected = fp8_expert_parts_triton(*arguments), fp8_expert_parts_reference(*arguments)
    assert found.shape == expected.shape
    # Inner values on either side of a rounding differ by an eighth.
    error = (found[which >= 0].float() - expected[which >= 0].float()).abs()
    assert (error <= 0.03 * expected.abs().amax()).all() if tokens else True
