"""The products of the chosen experts of each token: share * down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.silu_mul import silu_mul_reference


def expert_parts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor
) -> Tensor:
    """Return [T, K, H], in the dtype of x: the output of each chosen expert times its share.

    Args:
        x: [T, H].
        gate_up: [E, 2 * I, H], gates first.
        down: [E, H, I].
        experts: [T, K] int32.
        shares: [T, K] float32.
    """
    tokens, chosen = experts.shape
    out = x.new_empty((tokens * chosen, x.shape[1]))
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    pairs = experts.flatten().argsort(stable=True)  # of token and expert, by expert
    for expert, of_expert in enumerate(torch.split(pairs, counts)):
        if len(of_expert):
            inner = silu_mul_reference(F.linear(x[of_expert // chosen], gate_up[expert]))
            share = shares.view(-1, 1)[of_expert]
            out[of_expert] = (F.linear(inner, down[expert]) * share).to(x.dtype)
    return out.view(tokens, chosen, -1)


def _fake(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    return x.new_empty((*experts.shape, x.shape[1]))


expert_parts = register_op("expert_parts", expert_parts_reference, mutates=(), fake=_fake, inlined=False)
