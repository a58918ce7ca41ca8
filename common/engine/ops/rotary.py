"""Rotary position embedding: frequencies, and the rotation of queries and keys (arXiv 2104.09864).

The halves convention of Hugging Face checkpoints: dimension i is paired with i + head_dim / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.rope_config import RopeConfig


def rotary_angles(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For positions [T] and inv_freq [D/2] float32, computed in float32, returned in `dtype`.

    Returns (cos, sin), each [T, 1, D]; the first half of sin is negated, as `rotary` wants it.
    """
    angles = positions.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by the angles of `rotary_angles`; returns the same shape, contiguous."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32. Source: transformers `modeling_rope_utils`; YaRN: arXiv 2309.00071."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    powers = rope.theta**exponents
    plain: Tensor = 1.0 / powers
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return _yarn(powers, plain, rope, head_dim)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, a smooth blend between."""
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / rope.factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(powers: Tensor, plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolated frequencies where a dimension turns seldom, plain ones where often, a ramp between."""

    def dimension(rotations: float) -> float:
        turns = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * powers) * ramp + plain * (1 - ramp)
