"""The rotation of new tokens, the write of their keys and values, and their attention: one launch in a decode step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_reference
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import KeyParts, keys_of_part, store_part
from common.engine.ops.kv_rounding import for_fp8_keys, rounded_to_fp8
from common.engine.ops.paged_attention import check_layout, load_keys, online_softmax
from common.engine.ops.part_plan import part_at
from common.engine.ops.registration import register_op
from common.engine.ops.rotary_kv_write import rotary_kv_write_reference
from common.engine.ops.rotated_heads import rotated_heads
from common.engine.ops.shared_memory import cut_attention, room_of
from common.engine.ops.step_plans import decode_division
from common.engine.ops.triton_kernel import (
    LOG2_E,
    await_results,
    chained,
    kernel,
    kernel_with_varying,
    launch_next,
    next_power_of_2,
    tl,
)

# As measured on an H200 (tests/bench/NOTES.md): for more requests two launches are faster.
MAX_REQUESTS = 1
BLOCK_KEYS, WARPS, STAGES = 64, 8, 2


class NewTokens(NamedTuple):
    """The arguments of `rotary_decode` that describe new tokens; see `rotary_kv_write`."""

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    slots: Tensor


def fuses_rotation(qkv: Tensor) -> bool:
    """Return whether one launch computes a step with qkv [B, heads + 2 * kv_heads, D] faster than two."""
    return qkv.is_cuda and qkv.shape[0] <= MAX_REQUESTS


def rotary_decode_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Do what `rotary_kv_write` and then `decode_attention` do, for requests whose last tokens are the new ones.

    Args:
        qkv: [B, heads + 2 * kv_heads, D]; it stays as it is.

    Returns [B, heads, D].
    """
    rotated = qkv.clone()
    planes, scales = (key_plane, value_plane), (key_scale, value_scale)
    rotary_kv_write_reference(rotated, cos, sin, q_weight, k_weight, eps, *planes, slots, *scales)
    query = rotated[:, : qkv.shape[1] - 2 * key_plane.shape[2]]
    return decode_reference(query, *planes, page_table, seq_lens, max_seq_len, window, scale, *scales)


@kernel
def _attend_block(  # type: ignore[no-untyped-def]
    query, key, value, live, most, total, out, scale_log2
):
    """Add a block of keys to the running softmax: (maxima, sums, outputs) of the query rows."""
    score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
    score = tl.where(live[None, :], score, float("-inf"))
    return online_softmax(most, total, out, score, value.to(query.dtype), True)


@kernel_with_varying("table_stride", "window", "splits", "num_slots")
def _rotary_decode_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [B, HEADS + 2 * KV_HEADS, D]
    cos_ptr,  # [B, 2 * TURNED]
    sin_ptr,
    q_weight_ptr,  # [D]; read if NORM
    k_weight_ptr,
    slots_ptr,  # [num_slots] int64
    key_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, D]
    value_ptr,
    table_ptr,  # [B, max_pages]
    lens_ptr,  # [B]
    out_ptr,  # [B, HEADS, D]
    part_ptr,  # this and the next two: see `store_part`
    lse_ptr,
    ended_ptr,
    num_slots,
    eps,
    qkv_stride,
    table_stride,
    window,
    scale_log2,  # scale * log2(e), times key_scale
    key_scale,
    value_scale,
    splits,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,  # half of the dimensions that are rotated
    NORM: tl.constexpr,
    EIGHT_BITS: tl.constexpr,  # pages hold e4m3
    PLANNED: tl.constexpr,  # never: usually there is one request
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,  # a request may have more than one part
    COMBINED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,  # query heads of one KV head, padded for the matrix units
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GRANULE: tl.constexpr,  # this and the next two: see key_parts
    LIVE_ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program computes one part of one request's keys, for all query heads of one KV head.

    It reads the first block of keys before it waits for the new token: only the new key is written by this step.
    """
    launch_next(CHAINED)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, place = tl.program_id(0), tl.program_id(1)
    request, split, length, granules = part_at(lens_ptr, lens_ptr, place, splits, PLANNED, FIELDS)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
    begin, end, used = keys_of_part(begin, length, split, splits, granules, PLANNED, GRANULE, BLOCK_N)
    last = length - 1

    row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (dim < D)[None, :]
    position = begin + tl.arange(0, BLOCK_N)
    old = position < tl.minimum(end, last)
    page = tl.load(table_ptr + request * table_stride + position // PAGE_SIZE, mask=old, other=0)
    key = load_keys(key_ptr, page, position, old, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
    value = load_keys(value_ptr, page, position, old, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
    await_results(CHAINED)

    token = qkv_ptr + request * qkv_stride
    cos, sin = cos_ptr + request * (2 * TURNED), sin_ptr + request * (2 * TURNED)
    one = tl.arange(0, 1)
    heads = token + (kv_head * GROUP + row) * D
    query = rotated_heads(heads, row < GROUP, cos, sin, q_weight_ptr, eps, D, TURNED, BLOCK_D, NORM)
    if EIGHT_BITS:
        query = for_fp8_keys(query)
    added = token + (HEADS + kv_head + one) * D
    new_key = rotated_heads(added, one < 1, cos, sin, k_weight_ptr, eps, D, TURNED, BLOCK_D, NORM)
    new_value = tl.load(added[:, None] + KV_HEADS * D + dim[None, :], mask=inside, other=0.0)
    if EIGHT_BITS:
        stored_key = rounded_to_fp8(new_key, key_scale)
        stored_value = rounded_to_fp8(new_value, value_scale)
        new_key, new_value = stored_key.to(query.dtype), stored_value.to(query.dtype)
        key, value = key.to(query.dtype), value.to(query.dtype)
    else:
        new_key, new_value = new_key.to(key.dtype), new_value.to(value.dtype)
        stored_key, stored_value = new_key, new_value
    slot = tl.load(slots_ptr + request, mask=request < num_slots, other=0)
    if (begin < end) & (end == length) & (slot >= PAGE_SIZE):
        stored = (slot * KV_HEADS + kv_head) * D + dim[None, :]
        tl.store(key_ptr + stored, stored_key.to(key_ptr.dtype.element_ty), mask=inside)
        tl.store(value_ptr + stored, stored_value.to(value_ptr.dtype.element_ty), mask=inside)

    # The new key is the first of its part. Were it selected among the keys of a step, the loop could not copy them
    # ahead of their use.
    newest = (begin < end) & (end == length)
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale_log2
    most = tl.where(newest, score, float("-inf"))
    total = tl.where(newest, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    out = tl.where(newest, tl.zeros((ROWS, BLOCK_D), tl.float32) + new_value.to(tl.float32), 0.0)
    if begin < end:
        most, total, out = _attend_block(query, key, value, old, most, total, out, scale_log2)
    for start in range(begin + BLOCK_N, tl.minimum(end, last), BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        old = position < tl.minimum(end, last)
        page = tl.load(table_ptr + request * table_stride + position // PAGE_SIZE, mask=old, other=0)
        key = load_keys(key_ptr, page, position, old, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        value = load_keys(value_ptr, page, position, old, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        if EIGHT_BITS:
            key, value = key.to(query.dtype), value.to(query.dtype)
        most, total, out = _attend_block(query, key, value, old, most, total, out, scale_log2)

    result = out / tl.where(total > 0.0, total, 1.0)[:, None]  # zero for a padding row
    if EIGHT_BITS:
        result *= value_scale
    lse = most + tl.log2(tl.where(total > 0.0, total, 1.0))
    ended = ended_ptr + request * KV_HEADS + kv_head
    base = request * HEADS + kv_head * GROUP
    shift = (place - split - request) * HEADS
    store_part(
        *(result, lse, base + row, row < GROUP, dim, base, 0, GROUP, split, used, shift, HEADS),
        *(out_ptr, part_ptr, lse_ptr, ended),
        *(SPLIT, COMBINED, HEADS, GROUP, D, BLOCK_D, LIVE_ROWS, TOGETHER),
    )


def rotary_decode_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    max_keys: int = BLOCK_KEYS,
) -> Tensor:
    """Split over keys (flash-decoding). A padding row (length 0) yields zeros.

    The previous kernel on the stream computes `qkv`, and lets this one be launched only after all kernels before it
    have ended.

    Args:
        max_keys: the maximum number of keys per block.
    """
    batch, all_heads, head_dim = qkv.shape
    _, page_size, kv_heads, _ = key_plane.shape
    heads, dims = all_heads - 2 * kv_heads, cos.shape[-1]
    check_layout(qkv[:, :heads], key_plane, value_plane, page_table, seq_lens)
    assert cos.shape == sin.shape == (batch, 1, dims), f"angles {tuple(cos.shape)} for {batch} tokens"
    assert 0 < dims <= head_dim, f"angles of {dims} dimensions for heads of {head_dim}"
    assert dims % 2 == 0, f"{dims} dimensions cannot be rotated in pairs"
    assert cos.is_contiguous() and sin.is_contiguous(), "angles must be contiguous"  # noqa: PT018
    assert (q_weight is None) == (k_weight is None), "queries and keys are normalised together"
    assert page_table.shape[0] >= batch, "one page list per request"
    assert slots.is_contiguous() and slots.shape[0] <= batch, "one slot per token"  # noqa: PT018
    out = qkv.new_empty((batch, heads, head_dim))
    if batch == 0:
        return out
    division, _ = decode_division(qkv[:, :heads], key_plane, max_seq_len, window)
    group = heads // kv_heads
    rows = max(next_power_of_2(group), 16)
    _, block_keys = cut_attention(
        rows, max_keys, STAGES, head_dim, qkv.element_size(), room_of(qkv.device), rows
    )
    parts = KeyParts(batch * kv_heads, group, division, batch, None, out)
    _rotary_decode_kernel[(kv_heads, parts.places)](
        *(qkv, cos, sin, cos if q_weight is None else q_weight, cos if k_weight is None else k_weight),
        *(slots, key_plane, value_plane, page_table, seq_lens, out, *parts.arguments),
        slots.shape[0],
        eps,
        qkv.stride(0),
        page_table.stride(0),
        window or 0,
        scale * key_scale * LOG2_E,
        key_scale,
        value_scale,
        division.splits,
        PAGE_SIZE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        TURNED=dims // 2,
        NORM=q_weight is not None,
        EIGHT_BITS=key_plane.dtype is FP8,
        WINDOW=window is not None,
        ROWS=rows,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        BLOCK_N=block_keys,
        **parts.constants,
        num_warps=WARPS,
        num_stages=STAGES,
        **chained(qkv.device),
    )
    parts.combine()
    return out


def _fake(qkv: Tensor, *given: Any) -> Tensor:
    key_plane = given[len(NewTokens._fields)]
    return torch.empty_like(
        qkv[:, : qkv.shape[1] - 2 * key_plane.shape[2]], memory_format=torch.contiguous_format
    )


rotary_decode = register_op(
    "rotary_decode",
    rotary_decode_reference,
    mutates=("key_plane", "value_plane"),
    fake=_fake,
    cuda=rotary_decode_triton,
)
