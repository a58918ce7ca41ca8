"""Products of experts with FP8 weights, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops import fp8_grouped
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_experts import fp8_expert_parts_reference
from common.engine.ops.fp8_grouped import choose_grouped_tiles, fp8_expert_parts_triton, sum_more_steps
from common.engine.ops.fp8_tiles import SUMMED, Fp8Tiles
from common.engine.ops.shared_memory import H200
from common.engine.ops.triton_kernel import cdiv, tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
    # Inner values of pairs without an expert are undefined, and quantised like the others.
    pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow"),
]


def check_pairs(which: Tensor, experts: int, hidden: int, inner: int, blocks: bool, static: bool) -> None:
    """Compare random products of the experts `which` [T, K] with the reference."""
    tokens, chosen = which.shape
    x, shares = torch.randn(tokens, hidden).half(), torch.rand(tokens, chosen)
    gate_up = torch.randn(experts, 2 * inner, hidden).to(FP8)
    down = torch.randn(experts, hidden, inner).to(FP8)
    within, across = cdiv(inner, 128), cdiv(hidden, 128)
    of_gates = torch.rand((experts, 2, within, across) if blocks else (experts, 2 * inner)) / 8
    of_downs = torch.rand((experts, across, within) if blocks else (experts, hidden)) / 8
    given = torch.tensor([0.01, 0.02]) if static else None
    arguments = x, gate_up, of_gates, down, of_downs, given, which, shares
    found, expected = fp8_expert_parts_triton(*arguments), fp8_expert_parts_reference(*arguments)
    assert found.shape == expected.shape
    ours, theirs = found[which >= 0].float(), expected[which >= 0].float()
    assert (ours - theirs).norm() <= 0.06 * theirs.norm()
    # An inner value on the other side of a rounding differs by an eighth, and may be most of its row.
    assert ((ours - theirs).abs() <= 0.2 * theirs.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("blocks", "static"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 3, 2, 48, 32), (18, 2, 2, 136, 40), (0, 3, 1, 128, 128)],
)
def test_pairs(
    tokens: int, experts: int, chosen: int, hidden: int, inner: int, blocks: bool, static: bool
) -> None:
    """Sizes are no multiples of a block; a pair without an expert is left out."""
    which = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)] or [torch.zeros(0)])
    which = which.to(torch.int32).view(tokens, chosen)
    which[2:3, 0] = -1
    check_pairs(which, experts, hidden, inner, blocks, static)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "blocks", "static"),
    [
        (2, 512, 384, False, False),  # steps of 256 and of 128
        (3, 384, 256, False, True),  # steps of 128 in both products
        (3, 200, 512, False, False),  # the up product has no whole steps, nor the down product whole tiles
        (4, 512, 72, False, True),  # the same the other way around
        (3, 200, 136, True, False),
        (16, 128, 40, False, False),
    ],
)
def test_few_tokens_need_no_groups(
    tokens: int, hidden: int, inner: int, blocks: bool, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens choose the same experts in other orders, all use the shared one, and some experts have no token."""
    monkeypatch.delattr(fp8_grouped, "group_pairs_triton")
    own = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    which = torch.cat([own, torch.full((tokens, 1), 5)], dim=1).int()
    which[1] = -1  # a padding row
    which[tokens // 2, 0] = -1
    check_pairs(which, 6, hidden, inner, blocks, static)


@pytest.mark.parametrize(
    ("depth", "gated", "step", "stages", "together"),
    [(2048, True, 256, 3, 2), (768, True, 128, 4, 3), (768, False, 128, 4, 3), (2048, False, 128, 4, 4)],
)
def test_tiles_of_few_tokens(depth: int, gated: bool, step: int, stages: int, together: int) -> None:
    """The divisions that were measured (tests/bench/NOTES.md)."""
    given = choose_grouped_tiles(32, 128, gated, False, H200.shared_bytes)
    found = sum_more_steps(given, depth, gated, H200.shared_bytes)
    assert found == Fp8Tiles(64, step, 4, stages, 16, together=together)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("depth", [40, 128, 320, 640, 1280, 1408, 1536, 2880, 3584, 7168])
@pytest.mark.parametrize("shared", [99 << 10, H200.shared_bytes])
def test_long_sums_are_whole_and_bounded(depth: int, gated: bool, shared: int) -> None:
    given = choose_grouped_tiles(32, 128, gated, False, shared)
    found = sum_more_steps(given, depth, gated, shared)
    assert found == given or found.together > 1
    assert found == given or depth % (found.depth * found.together) == 0
    assert found.depth * found.together <= SUMMED
    assert found.shared_bytes(matrices=2 if gated and found == given else 1) <= shared // 2
