"""The steps between the merged QKV product and attention: q/k norm, rotation, and the write to the paged cache.

`rotary_qk` does only the rotation, for a vision tower that has no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.kv_rounding import as_read, as_stored, rounded_to_fp8
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import rms_norm_reference
from common.engine.ops.rotary import rotary
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

BLOCK_HEADS = 16


def rotary_kv_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    key_plane: Tensor,
    value_plane: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Normalise and rotate queries and keys in place, then store keys and values in their pages.

    If pages hold eight bits, keys and values of qkv are rounded likewise, in place: all readers see the same values.

    Args:
        qkv: [T, heads + 2 * kv_heads, D], queries, keys and values of each token, mutated.
        cos, sin: [T, 1, R] of `rotary_angles`; the first R <= D dimensions of a head are rotated.
        q_weight, k_weight: [D] of the RMSNorm before the rotation; None: no norm. Both or neither.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], mutated.
        slots: [S] int64, S <= T, page * page_size + offset of the first S tokens; the live ones are distinct.
            A slot in page 0 is padding, and so is a token without a slot: nothing is stored for either.
        key_scale, value_scale: what stored keys and values are multiplied by; powers of two.
    """
    kv_heads, count = key_plane.shape[2], slots.shape[0]
    heads = qkv.shape[1] - 2 * kv_heads
    rotated = qkv[:, : heads + kv_heads]
    if q_weight is not None and k_weight is not None:
        query, key = rotated[:, :heads], rotated[:, heads:]
        parts = rms_norm_reference(query, q_weight, eps), rms_norm_reference(key, k_weight, eps)
        rotated.copy_(rotary(torch.cat(parts, dim=1), cos, sin))
    else:
        rotated.copy_(rotary(rotated, cos, sin))
    key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    scales = key_scale, value_scale
    if key_plane.dtype is FP8:
        for new, scale in zip((key, value), scales, strict=True):
            new.copy_(as_read(as_stored(new, FP8, scale), new.dtype, scale))
    store_in_pages(key[:count], value[:count], key_plane, value_plane, slots, *scales)


def store_in_pages(
    key: Tensor,
    value: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write token t's key and value into slot slots[t]; slots in page 0 are padding and keep it zero.

    Args:
        key, value: [T, kv_heads, D].
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], mutated.
        slots: [T] int64, page * page_size + offset; live slots are distinct.
        key_scale, value_scale: what stored keys and values are multiplied by; powers of two.
    """
    live = (slots >= key_plane.shape[1])[:, None, None]
    for new, plane, scale in ((key, key_plane, key_scale), (value, value_plane, value_scale)):
        stored, flat = as_stored(new, plane.dtype, scale), plane.view(-1, plane.shape[2], plane.shape[3])
        if plane.dtype is FP8:  # which torch does not copy by index
            stored, flat = stored.view(torch.uint8), flat.view(torch.uint8)
        flat.index_copy_(0, slots, torch.where(live, stored, 0))


@kernel_with_varying("num_slots")
def _rotary_kv_write_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    num_slots,
    token_stride,  # stride between tokens in qkv
    eps,
    key_scale,
    value_scale,
    EIGHT_BITS: tl.constexpr,  # pages hold e4m3
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    TURNED: tl.constexpr,  # R / 2: the first R dimensions of a head are rotated
    BLOCK_HALF: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program handles some heads of one token. One thread has both dimensions of a pair, so in-place is safe.

    Lane i < TURNED has the pair (i, i + TURNED) that is rotated. The other lanes have pairs of the remaining
    dimensions. Without any, TURNED is HALF and the pairs are the two halves of a head.
    """
    await_previous(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    inside = (dim < HALF)[None, :]
    exists = (head < HEADS + 2 * KV_HEADS)[:, None] & inside
    is_rotated = (head < HEADS + KV_HEADS)[:, None] & inside
    dtype = qkv_ptr.dtype.element_ty
    low, high = dim, dim + HALF
    if TURNED < HALF:
        low = tl.where(dim < TURNED, dim, dim + TURNED)
        high = tl.where(dim < TURNED, dim + TURNED, dim + HALF)
    base = qkv_ptr + token * token_stride + head[:, None] * (2 * HALF)
    first = tl.load(base + low[None, :], mask=exists, other=0.0)
    second = tl.load(base + high[None, :], mask=exists, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / (2 * HALF) + eps)[:, None]
        is_query = (head < HEADS)[:, None]
        q_first = tl.load(q_weight_ptr + low, mask=dim < HALF, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + low, mask=dim < HALF, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + high, mask=dim < HALF, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + high, mask=dim < HALF, other=0.0).to(tl.float32)
        # A float32 weight multiplies before the result is rounded: see rms_norm.
        rounded = q_weight_ptr.dtype.element_ty
        x = (x * scale).to(rounded).to(tl.float32) * tl.where(is_query, q_first[None, :], k_first[None, :])
        y = (y * scale).to(rounded).to(tl.float32) * tl.where(is_query, q_second[None, :], k_second[None, :])
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    angle = token * (2 * TURNED) + dim
    turns = dim < TURNED
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + angle + TURNED, mask=turns, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)[None, :]  # negated
    sin_2 = tl.load(sin_ptr + angle + TURNED, mask=turns, other=0.0).to(tl.float32)[None, :]
    first = tl.where(is_rotated, (x * cos + y * sin).to(dtype), first)
    second = tl.where(is_rotated, (y * cos_2 + x * sin_2).to(dtype), second)
    written = is_rotated
    stored_first, stored_second = first, second
    if EIGHT_BITS:
        scale = tl.where(head < HEADS + KV_HEADS, key_scale, value_scale)[:, None]
        stored_first, stored_second = rounded_to_fp8(first, scale), rounded_to_fp8(second, scale)
        is_new = (head >= HEADS)[:, None]
        first = tl.where(is_new, (stored_first * scale).to(dtype), first)
        second = tl.where(is_new, (stored_second * scale).to(dtype), second)
        written = exists
    tl.store(base + low[None, :], first, mask=written)
    tl.store(base + high[None, :], second, mask=written)

    slot = tl.load(slots_ptr + token, mask=token < num_slots, other=0)
    live = tl.where(exists, slot, 0) >= PAGE_SIZE
    is_key = is_rotated & (head >= HEADS)[:, None] & live
    key_place = (slot * KV_HEADS + head - HEADS)[:, None] * (2 * HALF)
    tl.store(key_ptr + key_place + low[None, :], stored_first.to(key_ptr.dtype.element_ty), mask=is_key)
    tl.store(key_ptr + key_place + high[None, :], stored_second.to(key_ptr.dtype.element_ty), mask=is_key)
    is_value = (head >= HEADS + KV_HEADS)[:, None] & live
    value_place = key_place - KV_HEADS * (2 * HALF)
    tl.store(
        value_ptr + value_place + low[None, :], stored_first.to(value_ptr.dtype.element_ty), mask=is_value
    )
    tl.store(
        value_ptr + value_place + high[None, :], stored_second.to(value_ptr.dtype.element_ty), mask=is_value
    )


def rotary_kv_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    key_plane: Tensor,
    value_plane: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    count, all_heads, head_dim = qkv.shape
    kv_heads = key_plane.shape[2]
    dims = cos.shape[-1]
    assert qkv.stride()[1:] == (head_dim, 1), "heads of a token must be adjacent"
    assert cos.shape == sin.shape == (count, 1, dims), f"angles {tuple(cos.shape)} for {count} tokens"
    assert dims <= head_dim, f"angles of {dims} dimensions for heads of {head_dim}"
    assert dims % 2 == head_dim % 2 == 0, f"heads of {head_dim}, {dims} rotated: both must be even"
    assert cos.is_contiguous() and sin.is_contiguous(), "angles must be contiguous"  # noqa: PT018
    assert key_plane.shape[2:] == value_plane.shape[2:] == (kv_heads, head_dim), "planes have another shape"
    assert key_plane.is_contiguous() and value_plane.is_contiguous(), "planes must be contiguous"  # noqa: PT018
    assert slots.is_contiguous() and slots.shape[0] <= count, "one slot per token"  # noqa: PT018
    assert (q_weight is None) == (k_weight is None), "queries and keys are normalised together"
    for weight in (q_weight, k_weight):
        assert weight is None or weight.dtype in (qkv.dtype, torch.float32), f"a norm of {weight.dtype}"
    if count == 0:
        return
    _rotary_kv_write_kernel[(count, cdiv(all_heads, BLOCK_HEADS))](
        qkv,
        cos,
        sin,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        key_plane,
        value_plane,
        slots,
        slots.shape[0],
        qkv.stride(0),
        eps,
        key_scale,
        value_scale,
        EIGHT_BITS=key_plane.dtype is FP8,
        PAGE_SIZE=key_plane.shape[1],
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        TURNED=dims // 2,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        BLOCK_HEADS=BLOCK_HEADS,
        NORM=q_weight is not None,
        num_warps=4,
        **chained(qkv.device),
    )


def _fake(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    key_plane: Tensor,
    value_plane: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    return None


rotary_kv_write = register_op(
    "rotary_kv_write",
    rotary_kv_write_reference,
    mutates=("qkv", "key_plane", "value_plane"),
    fake=_fake,
    cuda=rotary_kv_write_triton,
)


def rotary_qk_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys in place, in float32 if the angles are float32.

    Args:
        qkv: [T, 3, heads, D], queries, keys and values of each row, mutated.
        cos, sin: [T, 1, D] of `rotary_angles`.
    """
    rotated = qkv[:, :2].flatten(1, 2)
    qkv[:, :2] = rotary(rotated.to(cos.dtype), cos, sin).to(qkv.dtype).view_as(qkv[:, :2])


def rotary_qk_triton(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    count, three, heads, head_dim = qkv.shape
    assert three == 3, "queries, keys and values"
    assert qkv.stride()[1:] == (heads * head_dim, head_dim, 1), "heads of a row must be adjacent"
    assert cos.shape == sin.shape == (count, 1, head_dim), f"angles {tuple(cos.shape)} for {count} rows"
    assert cos.is_contiguous() and sin.is_contiguous(), "angles must be contiguous"  # noqa: PT018
    if count == 0:
        return
    unused, slots = cos, qkv.new_empty(0, dtype=torch.int64)  # without slots nothing is stored
    _rotary_kv_write_kernel[(count, cdiv(2 * heads, BLOCK_HEADS))](
        qkv,
        cos,
        sin,
        unused,
        unused,
        unused,
        unused,
        slots,
        0,
        qkv.stride(0),
        0.0,
        1.0,
        1.0,
        EIGHT_BITS=False,
        PAGE_SIZE=1,
        HEADS=heads,
        KV_HEADS=heads,
        HALF=head_dim // 2,
        TURNED=head_dim // 2,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        BLOCK_HEADS=BLOCK_HEADS,
        NORM=False,
        num_warps=4,
        **chained(qkv.device),
    )


def _fake_qk(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


rotary_qk = register_op(
    "rotary_qk", rotary_qk_reference, mutates=("qkv",), fake=_fake_qk, cuda=rotary_qk_triton
)
