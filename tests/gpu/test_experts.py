"""Compiled kernels of experts, compared with their torch references on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.attention.backend import TokenSlots
from common.engine.formats.dense import DenseFormat
from common.engine.layers.activations import Activations
from common.engine.layers.experts import Experts
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement
from common.engine.ops.expert_products import expert_parts, expert_parts_reference
from common.engine.ops.group_pairs import group_pairs_reference, group_pairs_triton
from common.engine.ops.route import route, route_reference
from common.engine.ops.sum_parts import (
    sum_parts,
    sum_parts_reference,
    sum_parts_rms_norm,
    sum_parts_rms_norm_reference,
)
from tests.fakes.tiny_model import MIXTURE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CUDA = "cuda"
# Tokens for each tile and form: every further one compiles kernels for seconds.
TOKENS = [1, 16, 17, 64, 65, 300]


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, device=CUDA) / shape[-1] ** 0.5).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        (torch.bfloat16, 1),
        (torch.bfloat16, 100),
        (torch.bfloat16, 129),
        (torch.float16, 1000),
        (torch.float32, 16),
    ],
)
@pytest.mark.parametrize(("experts", "groups", "kept"), [(128, 1, 1), (256, 8, 4), (60, 1, 1)])
def test_route(dtype: torch.dtype, tokens: int, experts: int, groups: int, kept: int) -> None:
    """Experts may differ from the reference's only where two scores are nearly equal.

    The seed fixes which scores are: another order of a sum of logits may then choose another expert, and a kept group
    may change, so 2 % of the rows may differ. Rows with the same experts are compared by their shares.
    """
    torch.manual_seed(tokens + experts)
    x = torch.randn(tokens, 512, device=CUDA).to(dtype)
    rows, correction = normal(experts + 1, 512, dtype=dtype), torch.randn(experts, device=CUDA)
    slots = torch.randint(0, 64, (tokens,), device=CUDA)
    for sigmoid in (False, True):
        given = (
            x,
            rows,
            correction if sigmoid else None,
            slots,
            16,
            8,
            1,
            True,
            sigmoid,
            groups,
            kept,
            True,
            1e-20,
            2.5,
        )
        (found, shares), (expected, expected_shares) = route(*given), route_reference(*given)
        same = (found == expected).all(1)
        assert same.double().mean() > 0.98
        torch.testing.assert_close(shares[same], expected_shares[same], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("total", [1, 64 * 8, 8192 * 8])
@pytest.mark.parametrize("count", [5, 128, 512])
def test_group_pairs(total: int, count: int) -> None:
    experts = torch.randint(-1, count, (total,), dtype=torch.int32, device=CUDA)
    given = (experts, count, 128, 32)
    found, expected = group_pairs_triton(*given), group_pairs_reference(*given)
    listed = int((experts >= 0).sum())
    assert torch.equal(found.tiles, expected.tiles)
    assert torch.equal(found.pairs[:listed], expected.pairs[:listed])


def choices(tokens: int, experts: int, chosen: int) -> Tensor:
    return torch.rand(tokens, experts, device=CUDA).topk(chosen).indices.to(torch.int32)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("dtype", "experts", "chosen", "hidden", "inner"),
    [
        (torch.bfloat16, 128, 8, 512, 192),
        (torch.bfloat16, 5, 1, 200, 104),
        (torch.float16, 60, 4, 256, 352),
        (torch.float32, 12, 3, 136, 72),
    ],
)
def test_expert_products(
    dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    gate_up = normal(experts, 2 * inner, hidden, dtype=dtype)
    down = normal(experts, hidden, inner, dtype=dtype)
    which, shares = choices(tokens, experts, chosen), torch.rand(tokens, chosen, device=CUDA)
    which[tokens // 3 : tokens // 2] = -1
    found = expert_parts(x, gate_up, down, which, shares)
    expected = expert_parts_reference(x.double(), gate_up.double(), down.double(), which, shares.double())
    limit = TOLERANCE[dtype]
    has = which >= 0
    torch.testing.assert_close(found[has].double(), expected[has], atol=limit, rtol=limit)
    summed = sum_parts_reference(found, which)
    torch.testing.assert_close(sum_parts(found, which), summed, atol=limit, rtol=limit)
    given = (found, which, x, normal(hidden, dtype=dtype), 1e-6)
    for ours, theirs in zip(sum_parts_rms_norm(*given), sum_parts_rms_norm_reference(*given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)


@pytest.mark.parametrize("tokens", [5, 200])
def test_a_graph_serves_other_choices_than_it_was_captured_with(tokens: int) -> None:
    """The grid does not depend on the routing, and no step waits for the device."""
    x, rows = torch.randn(tokens, 256, device=CUDA).bfloat16(), normal(32, 256, dtype=torch.bfloat16)
    gate_up, down = (
        normal(32, 256, 256, dtype=torch.bfloat16),
        normal(32, 256, 128, dtype=torch.bfloat16),
    )

    def run() -> Tensor:
        which, shares = route(x, rows, None, None, 0, 4, 0, False, False, 1, 1, True, 0.0, 1.0)
        return sum_parts(expert_parts(x, gate_up, down, which, shares), which)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    # All tokens equal: each uses the same experts. Then as different as can be.
    for values in (x[:1].expand(tokens, -1).clone(), torch.randn(tokens, 256, device=CUDA).bfloat16()):
        x.copy_(values)
        graph.replay()
        replayed = out.clone()
        # The library may sum logits in another order, which decides near-ties between experts.
        near = (replayed - run()).abs().amax(1) < TOLERANCE[torch.bfloat16]
        assert near.double().mean() > 0.97


def test_unused_experts_are_not_read() -> None:
    """Their weights may hold anything."""
    x, shares = torch.randn(3, 256, device=CUDA).bfloat16(), torch.rand(3, 2, device=CUDA)
    gate_up, down = (
        normal(8, 128, 256, dtype=torch.bfloat16),
        normal(8, 256, 64, dtype=torch.bfloat16),
    )
    gate_up[[0, 7]] = torch.nan
    down[[0, 7]] = torch.nan
    which = torch.tensor([[1, 2], [6, 1], [2, 3]], dtype=torch.int32, device=CUDA)
    assert not expert_parts(x, gate_up, down, which, shares).isnan().any()


@pytest.mark.parametrize("tokens", [5, 130])
def test_a_layer_equals_the_same_layer_on_a_cpu(tokens: int) -> None:
    """Router, shared experts and the norm after them, with padding rows."""
    cpu, gpu = (
        Experts("layer", MIXTURE, DenseFormat(Placement(torch.float32, torch.device(each))))
        for each in ("cpu", CUDA)
    )
    for ours, theirs in zip(cpu.parameters(), gpu.parameters(), strict=True):
        theirs.copy_(ours.normal_(std=0.3))
    x, stream = torch.randn(2, tokens, MIXTURE.hidden_size)
    slots = torch.arange(tokens) % 48
    norms = []
    for each in ("cpu", CUDA):
        norms.append(RmsNorm("norm", len(x[0]), 1e-6, Placement(torch.float32, torch.device(each))))
        norms[-1].weight.fill_(1.5)
    expected = cpu.add_norm(Activations(x), stream, norms[0], TokenSlots(slots, 16))
    found = gpu.add_norm(Activations(x.cuda()), stream.cuda(), norms[1], TokenSlots(slots.cuda(), 16))
    torch.testing.assert_close(found[0].tensor().cpu(), expected[0].tensor(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1].cpu(), expected[1], atol=1e-4, rtol=1e-4)
