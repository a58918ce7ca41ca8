"""Rotary position embedding: frequencies, and the rotation of queries and keys (arXiv 2104.09864).

The halves convention of Hugging Face checkpoints: dimension i is paired with i + head_dim / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.rope_config import LONGROPE, RopeConfig
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import kernel, kernel_with_varying, next_power_of_2, tl

ANGLE_BLOCK = 1024  # elements per program


def rotary_angles_reference(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the angles of positions [T] and inv_freq [D/2] float32 in float32 and return them in `dtype`.

    Returns (cos, sin), each [T, 1, D]; the first half of sin is negated, as `rotary` expects it.
    """
    angles = positions.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@kernel
def _store_angles(cos_ptr, sin_ptr, angle, factor, half, live):  # type: ignore[no-untyped-def]
    """Store at pointers of the first halves; the second halves follow at `half`. The first half of sin is negated."""
    dtype = cos_ptr.dtype.element_ty
    cos = (tl.cos(angle) * factor).to(dtype)
    sin = (tl.sin(angle) * factor).to(dtype)
    tl.store(cos_ptr, cos, mask=live)
    tl.store(cos_ptr + half, cos, mask=live)
    tl.store(sin_ptr, -sin, mask=live)
    tl.store(sin_ptr + half, sin, mask=live)


@kernel_with_varying("count")
def _angles_kernel(  # type: ignore[no-untyped-def]
    positions_ptr,  # [T] int64
    inv_freq_ptr,  # [half] float32
    cos_ptr,  # [T, 2 * half]
    sin_ptr,
    factor,
    count,
    half,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    dim = tl.arange(0, HALF)
    live = (token < count)[:, None] & (dim < half)[None, :]
    position = tl.load(positions_ptr + token, mask=token < count, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq_ptr + dim, mask=dim < half, other=0.0)[None, :]
    place = token[:, None] * (2 * half) + dim[None, :]
    _store_angles(cos_ptr + place, sin_ptr + place, angle, factor, half, live)


@kernel_with_varying("count")
def _axis_angles_kernel(  # type: ignore[no-untyped-def]
    positions_ptr,  # [T, AXES] int64
    axes_ptr,  # [half] int64
    inv_freq_ptr,  # [half] float32
    cos_ptr,  # [T, 2 * half]
    sin_ptr,
    factor,
    count,
    half,
    AXES: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    dim = tl.arange(0, HALF)
    live = (token < count)[:, None] & (dim < half)[None, :]
    axis = tl.load(axes_ptr + dim, mask=dim < half, other=0)
    source = positions_ptr + token[:, None] * AXES + axis[None, :]
    position = tl.load(source, mask=live, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + dim, mask=dim < half, other=0.0)[None, :]
    place = token[:, None] * (2 * half) + dim[None, :]
    _store_angles(cos_ptr + place, sin_ptr + place, angle, factor, half, live)


def _launch_angles(
    kernel: Any,
    positions: Tensor,
    tables: tuple[Tensor, ...],
    factor: float,
    dtype: torch.dtype,
    **constants: int,
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin). `tables` are the inputs of `kernel` per frequency, [D/2] each."""
    count, half = positions.shape[0], tables[0].shape[0]
    assert positions.is_contiguous(), "positions must be dense"
    assert all(table.is_contiguous() for table in tables), "tables of frequencies must be dense"
    cos = torch.empty((count, 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if count:
        width = next_power_of_2(half)
        tokens = max(ANGLE_BLOCK // width, 1)
        sizes = {"TOKENS": tokens, "HALF": width, "num_warps": 4}
        kernel[(-(-count // tokens),)](
            positions, *tables, cos, sin, factor, count, half, **constants, **sizes
        )
    return cos, sin


def rotary_angles_triton(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _launch_angles(_angles_kernel, positions, (inv_freq,), factor, dtype)


def _fake_angles(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, 2 * inv_freq.shape[0])
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


rotary_angles = register_op(
    "rotary_angles", rotary_angles_reference, mutates=(), fake=_fake_angles, cuda=rotary_angles_triton
)


def rotary_angles_by_axis_reference(
    positions: Tensor, axes: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Do as `rotary_angles` for positions [T, A] on A axes: frequency f rotates by positions[:, axes[f]].

    axes: [D/2] int64.
    """
    chosen = positions.index_select(1, axes)
    angles = (chosen.to(torch.float32) * inv_freq)[:, None]
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary_angles_by_axis_triton(
    positions: Tensor, axes: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    assert axes.shape == inv_freq.shape, f"axes of {len(axes)} frequencies for {len(inv_freq)}"
    tables = axes, inv_freq
    return _launch_angles(_axis_angles_kernel, positions, tables, factor, dtype, AXES=positions.shape[1])


def _fake_axis_angles(
    positions: Tensor, axes: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _fake_angles(positions, inv_freq, factor, dtype)


rotary_angles_by_axis = register_op(
    "rotary_angles_by_axis",
    rotary_angles_by_axis_reference,
    mutates=(),
    fake=_fake_axis_angles,
    cuda=rotary_angles_by_axis_triton,
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by the angles of `rotary_angles`; returns the same shape, contiguous.

    With angles of fewer dimensions than D, only the first dimensions are rotated.
    """
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat((rotary(x[..., :dims], cos, sin), x[..., dims:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return [head_dim / 2] float32, for the rotated dimensions of a head.

    Source: transformers `modeling_rope_utils`; YaRN: arXiv 2309.00071.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    powers = rope.theta**exponents
    plain: Tensor = 1.0 / powers
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == LONGROPE:
        return 1.0 / (torch.tensor(rope.long_factors if rope.long else rope.short_factors) * powers)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return _yarn(powers, plain, rope, head_dim)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend smoothly between."""
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / rope.factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(powers: Tensor, plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Return interpolated frequencies for slowly rotating dimensions, plain ones for fast ones, and a ramp between."""

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
