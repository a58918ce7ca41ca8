"""The part of the gated delta rule that both of its forms share, as torch references: heads, gates, output norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6  # for normalising queries and keys


class DeltaHeads(NamedTuple):
    """Inputs of the rule for any number of tokens, float32. Hv value heads; queries and keys are repeated for them."""

    query: Tensor  # [..., Hv, dk], of unit length times dk ** -0.5
    key: Tensor  # [..., Hv, dk], of unit length
    value: Tensor  # [..., Hv, dv]
    beta: Tensor  # [..., Hv], how far the state moves to the new value
    decay: Tensor  # [..., Hv], logarithm of what remains of the state, at most 0


def delta_heads(
    convolved: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, heads: tuple[int, int, int]
) -> DeltaHeads:
    """Split the inputs into heads.

    Args:
        convolved: [..., C] = [queries | keys | values].
        b: [..., Hv]; so is a.
        a_log: [Hv] float32; so is dt_bias.
        heads: (Hv, dk, dv), the shape of a state.
    """
    count, key_dim, value_dim = heads
    keys = (convolved.shape[-1] - count * value_dim) // 2
    query, key, value = torch.split(convolved.float(), [keys, keys, count * value_dim], dim=-1)
    served = count * key_dim // keys  # value heads of a key head
    query, key = (
        _unit(part.view(*part.shape[:-1], -1, key_dim)).repeat_interleave(served, dim=-2)
        for part in (query, key)
    )
    decay = -a_log.exp() * F.softplus(a.float() + dt_bias)
    value = value.view(*value.shape[:-1], count, value_dim)
    return DeltaHeads(query * key_dim**-0.5, key, value, b.float().sigmoid(), decay)


def convolve(columns: Tensor, taps: Tensor) -> Tensor:
    """Return silu of the causal convolution of the last N of columns [B, K - 1 + N, C] by taps [C, K], per channel."""
    kernel, count = taps.shape[1], columns.shape[1] - taps.shape[1] + 1
    total = sum(columns[:, tap : tap + count].float() * taps[:, tap].float() for tap in range(kernel))
    assert isinstance(total, Tensor)
    return F.silu(total).to(columns.dtype)


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return [..., Hv * dv] in the gate's dtype for out [..., Hv, dv] float32: weight * norm(out) * silu(gate).

    gate: [..., Hv * dv]; weight: [dv] float32. The norm is over dv.
    """
    rounded = out.to(gate.dtype).float()
    normed = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(-2) * F.silu(gate.float())).to(gate.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)
