"""Compares kernels that fuse several steps of a layer with the references of those steps, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.decode_attention import decode_reference
from common.engine.ops.expert_products import expert_parts_reference
from common.engine.ops.few_experts import ExpertChoice, few_experts_triton
from common.engine.ops.rotary_decode import rotary_decode_triton
from common.engine.ops.rotary_kv_write import rotary_kv_write_reference
from common.engine.ops.route import ChoiceRule, route_reference
from common.engine.ops.sum_parts import sum_parts_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def compare_attention(
    device: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    norm: bool,
    window: int | None,
    tokens: tuple[int, int] = (70, 5),
) -> None:
    """Attend three requests, one of them padding, over pages without the new tokens.

    Args:
        dims: of a head, and those that are rotated.
        heads: of queries and of keys.
        tokens: of the first and the last request.
    """
    (dim, turned), (queries, keys) = dims, heads

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    qkv, cos, sin = made(3, queries + 2 * keys, dim), made(3, 1, turned), made(3, 1, turned)
    weights: tuple[Tensor | None, Tensor | None] = (made(dim), made(dim)) if norm else (None, None)
    planes = made(60, 4, keys, dim), made(60, 4, keys, dim)
    for plane in planes:
        plane[0] = 0.0
    table = torch.arange(1, 58, dtype=torch.int32, device=device).view(3, 19)
    lengths = torch.tensor([tokens[0], 0, tokens[1]], dtype=torch.int32, device=device)
    last = (lengths - 1).clamp(min=0).long()[:, None]
    slots = torch.where(lengths > 0, (table.gather(1, last // 4) * 4 + last % 4)[:, 0], 0)
    expected_planes, rotated = (planes[0].clone(), planes[1].clone()), qkv.clone()
    rotary_kv_write_reference(rotated, cos, sin, *weights, 1e-6, *expected_planes, slots)
    expected = decode_reference(rotated[:, :queries], *expected_planes, table, lengths, 76, window, 0.2)
    given = qkv.clone()
    norms = weights[0], weights[1], 1e-6
    if qkv.is_cuda:
        torch.cuda.synchronize()  # the kernel reads keys before it waits for the launch before it
    found = rotary_decode_triton(
        qkv, cos, sin, *norms, slots, planes[0], planes[1], table, lengths, 76, window, 0.2, max_keys=16
    )
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], atol=limit, rtol=limit)
    assert not found[1].any()
    torch.testing.assert_close(planes[0], expected_planes[0], atol=limit, rtol=limit)
    assert torch.equal(planes[1], expected_planes[1])
    assert torch.equal(qkv, given)


def compare_experts(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    counts: tuple[int, int, int],
    gated: bool,
    sizes: tuple[int, int],
    rule: tuple[bool, int, int],
) -> None:
    """Choose and multiply experts for tokens of which the second is padding.

    Args:
        counts: experts, those that a token chooses, and shared ones.
        sizes: hidden and inner.
        rule: sigmoid with a correction, groups, kept groups.
    """
    (experts, chosen, shared), (hidden, inner), (sigmoid, groups, kept) = counts, sizes, rule
    total = experts + shared

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)

    x, residual = torch.randn(2, tokens, hidden, device=device).to(dtype)
    gate_up, down = made(total, 2 * inner, hidden), made(total, hidden, inner)
    rows = made(experts + gated, hidden) * 4
    correction = torch.randn(experts, device=device) if sigmoid else None
    slots = torch.tensor([20, 3, 40, 50], device=device)[:tokens]
    by = correction, slots, 16, chosen, shared, gated, sigmoid, groups, kept, True, 1e-20, 1.5
    which, shares = route_reference(x, rows, *by)
    parts = expert_parts_reference(x, gate_up, down, which, shares)
    logits = F.linear(x.float(), rows.float())
    found = few_experts_triton(x, gate_up, down, residual, ExpertChoice(logits, ChoiceRule(*by)))
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, sum_parts_reference(parts, which) + residual, atol=limit, rtol=limit)
