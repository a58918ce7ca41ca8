"""Kernels of the prompt form of gated delta layers, for `delta_extend`, which describes the computation.

Four launches: the convolution, what tokens of a chunk do to each other, the scan over the chunks of a request, and the
gated norm. They find requests and chunks on the device, so graphs record them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.delta_saves import save_columns, save_state
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

CHUNK = 64
COLUMNS = 64  # channels of a program of the convolution
VALUES = 32  # values of a head in a program of the scan
ROWS = 16  # tokens of a program of the norm
REQUESTS = 64  # a kernel is compiled once for batches of up to so many requests
SHARED_BYTES = 160 << 10  # of the scan over heads of 128 values, which is the largest tile


@kernel
def chunk_of(starts_ptr, chunk, requests, REQUESTS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a chunk's request, the first token and the end of that request, and the chunk's first token."""
    index = tl.arange(0, REQUESTS)
    start = tl.load(starts_ptr + index, mask=index < requests, other=0)
    before = (start // CHUNK + index <= chunk) & (index < requests)
    request = tl.sum(before.to(tl.int32), axis=0) - 1
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    return request, begin, end, begin + (chunk - begin // CHUNK - request) * CHUNK


@kernel_with_varying("row_stride", "requests")
def _delta_inputs_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the channels first
    taps_ptr,  # [C, 4]
    conv_ptr,  # [slots, C, 3]
    slots_ptr,  # [B]
    starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    saves_ptr,  # [B, SAVES, 2]
    out_ptr,  # [T, C]
    row_stride,
    requests,
    channels,
    REQUESTS: tl.constexpr,  # at least `requests`
    CHUNK: tl.constexpr,
    SAVES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program convolves some channels of a chunk. That of a request's first chunk also moves its columns on."""
    await_previous(CHAINED)
    request, begin, end, at = chunk_of(starts_ptr, tl.program_id(0), requests, REQUESTS, CHUNK)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = at + tl.arange(0, CHUNK)
    real = channel < channels
    both = (token < end)[:, None] & real[None, :]
    # Columns of a request that begins with these tokens hold anything.
    kept = tl.where(tl.load(lengths_ptr + request) > end - begin, channels, 0)
    slot = tl.load(slots_ptr + request)
    columns = conv_ptr + slot * channels * 3 + channel * 3
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    for back in tl.static_range(4):
        source = token - back
        mine = both & (source >= begin)[:, None]
        place = projected_ptr + source.to(tl.int64)[:, None] * row_stride + channel[None, :]
        x = tl.load(place, mask=mine, other=0.0).to(tl.float32)
        if back > 0:
            earlier = both & (source < begin)[:, None] & (channel < kept)[None, :]
            x += tl.load(columns[None, :] + (source - begin + 3)[:, None], mask=earlier, other=0.0).to(
                tl.float32
            )
        tap = tl.load(taps_ptr + channel * 4 + 3 - back, mask=real, other=0.0).to(tl.float32)
        total += x * tap[None, :]
    dtype = out_ptr.dtype.element_ty
    place = out_ptr + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(place, (total / (1.0 + tl.exp(-total))).to(dtype), mask=both)
    if SAVES:
        place = projected_ptr + at * row_stride.to(tl.int64) + channel
        save_columns(
            place, row_stride, conv_ptr, saves_ptr, request, at - begin, channel, channels, SAVES, CHUNK
        )
    if (at == begin) & (slot > 0):
        last = projected_ptr + (end - 3) * row_stride.to(tl.int64) + channel
        count = end - begin
        x0 = tl.load(last, mask=channel < tl.where(count >= 3, channels, 0), other=0.0)
        x1 = tl.load(last + row_stride, mask=channel < tl.where(count >= 2, channels, 0), other=0.0)
        x2 = tl.load(last + 2 * row_stride, mask=channel < tl.where(count >= 1, channels, 0), other=0.0)
        x0 += tl.load(columns + count, mask=channel < tl.where(count < 3, kept, 0), other=0.0)
        x1 += tl.load(columns + count + 1, mask=channel < tl.where(count < 2, kept, 0), other=0.0)
        x2 += tl.load(columns + count + 2, mask=channel < tl.where(count < 1, kept, 0), other=0.0)
        # All threads have read what the stores below replace.
        tl.debug_barrier()
        tl.store(columns, x0, mask=real)
        tl.store(columns + 1, x1, mask=real)
        tl.store(columns + 2, x2, mask=real)


@kernel
def unit_rows(place, held, dim, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows of SIZE values, [CHUNK, BLOCK] float32, divided by their lengths; zero where not `held`."""
    x = tl.load(place + dim[None, :], mask=held[:, None] & (dim < SIZE)[None, :], other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]  # L2_EPS


@kernel_with_varying("row_stride", "requests")
def _delta_within_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, C + 2 * Hv + ...]
    convolved_ptr,  # [T, C]
    a_log_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    starts_ptr,  # [B + 1]
    fresh_ptr,  # [chunks, Hv, CHUNK, dv]: what tokens add, were the state zero
    through_ptr,  # [chunks, Hv, CHUNK, dk]: how they see the state before the chunk
    since_ptr,  # [chunks, Hv, CHUNK]: decay from the start of the chunk
    row_stride,
    requests,
    channels,
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,  # value heads of a key head
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program solves the triangular system of one head in one chunk, row by row."""
    await_previous(CHAINED)
    chunk, head = tl.program_id(0), tl.program_id(1)
    _, _, end, at = chunk_of(starts_ptr, chunk, requests, REQUESTS, CHUNK)
    if at < end:
        place, key_dim, value_dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        held = at + place < end
        token = (at + place).to(tl.int64)
        rows = convolved_ptr + token[:, None] * channels
        keys = HEADS // SERVED * KEY
        key = unit_rows(rows + keys + head // SERVED * KEY, held, key_dim, KEY)
        real = held[:, None] & (value_dim < VALUE)[None, :]
        value = tl.load(rows + 2 * keys + head * VALUE + value_dim[None, :], mask=real, other=0.0).to(
            tl.float32
        )
        gates = projected_ptr + token * row_stride + channels + head
        b = tl.load(gates, mask=held, other=0.0).to(tl.float32)
        raw = tl.load(gates + HEADS, mask=held, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        decay = tl.where(held, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0)
        since = tl.cumsum(decay, axis=0)
        beta = 1.0 / (1.0 + tl.exp(-b))
        weighted = key * beta[:, None]
        between = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
        product = tl.dot(weighted, tl.trans(key), input_precision="tf32x3")
        inverse = tl.where(place[:, None] > place[None, :], -product * between, 0.0)
        for row in range(1, CHUNK):
            line = tl.sum(tl.where(place[:, None] == row, inverse, 0.0), axis=0)
            line += tl.sum(line[:, None] * inverse, axis=0)
            inverse = tl.where(place[:, None] == row, line[None, :], inverse)
        inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        fresh = tl.dot(inverse, value * beta[:, None], input_precision="tf32x3")
        through = tl.dot(inverse, weighted * tl.exp(since)[:, None], input_precision="tf32x3")
        line = (chunk.to(tl.int64) * HEADS + head) * CHUNK + place
        tl.store(since_ptr + line, since)
        fresh_at = fresh_ptr + line[:, None] * VALUE + value_dim[None, :]
        tl.store(fresh_at, fresh, mask=(value_dim < VALUE)[None, :] & (place >= 0)[:, None])
        through_at = through_ptr + line[:, None] * KEY + key_dim[None, :]
        tl.store(through_at, through, mask=(key_dim < KEY)[None, :] & (place >= 0)[:, None])


@kernel
def _delta_scan_kernel(  # type: ignore[no-untyped-def]
    convolved_ptr,  # [T, C]
    fresh_ptr,  # [chunks, Hv, CHUNK, dv]
    through_ptr,  # [chunks, Hv, CHUNK, dk]
    since_ptr,  # [chunks, Hv, CHUNK]
    recurrent_ptr,  # [slots, Hv, dk, dv]
    slots_ptr,  # [B]
    starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    saves_ptr,  # [B, SAVES, 2]
    out_ptr,  # [T, Hv * dv]
    channels,
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    SAVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program carries some values of one head's state over all chunks of one request."""
    await_previous(CHAINED)
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    slot = tl.load(slots_ptr + request)
    place, key_dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value_dim = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_key, real_value = (key_dim < KEY)[None, :], (value_dim < VALUE)[None, :]
    inside = (key_dim < KEY)[:, None] & real_value
    states = (
        recurrent_ptr + (slot * HEADS + head) * KEY * VALUE + key_dim[:, None] * VALUE + value_dim[None, :]
    )
    # A request that begins with these tokens has a state of zeros, whatever the slot holds.
    kept = tl.where(tl.load(lengths_ptr + request) > end - begin, KEY, 0)
    state = tl.load(states, mask=(key_dim < kept)[:, None] & real_value, other=0.0)
    keys = HEADS // SERVED * KEY
    at = head // SERVED * KEY
    chunk = (begin // CHUNK + request).to(tl.int64)
    earlier = place[:, None] >= place[None, :]
    for first in range(begin, end, CHUNK):
        held = first + place < end
        token = (first + place).to(tl.int64)
        rows = convolved_ptr + token[:, None] * channels
        query = unit_rows(rows + at, held, key_dim, KEY) * KEY**-0.5
        key = unit_rows(rows + keys + at, held, key_dim, KEY)
        line = (chunk * HEADS + head) * CHUNK + place
        since = tl.load(since_ptr + line)
        last = tl.load(since_ptr + (chunk * HEADS + head) * CHUNK + CHUNK - 1)
        every = (place >= 0)[:, None]
        fresh_at = fresh_ptr + line[:, None] * VALUE + value_dim[None, :]
        through_at = through_ptr + line[:, None] * KEY + key_dim[None, :]
        fresh = tl.load(fresh_at, mask=real_value & every, other=0.0)
        through = tl.load(through_at, mask=real_key & every, other=0.0)
        added = fresh - tl.dot(through, state, input_precision="tf32x3")
        between = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
        seen = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        seen = tl.where(earlier, seen * between, 0.0)
        out = tl.dot(query * tl.exp(since)[:, None], state, input_precision="tf32x3")
        out = tl.dot(seen, added, out, input_precision="tf32x3")
        out_at = out_ptr + token[:, None] * HEADS * VALUE + head * VALUE + value_dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=held[:, None] & real_value)
        faded = key * tl.exp(last - since)[:, None]
        state = tl.dot(tl.trans(faded), added, state * tl.exp(last), input_precision="tf32x3")
        chunk += 1
        if SAVES:
            offset = head * KEY * VALUE + key_dim[:, None] * VALUE + value_dim[None, :]
            size = HEADS * KEY * VALUE
            save_state(
                recurrent_ptr, saves_ptr, request, first - begin, offset, size, state, inside, SAVES, CHUNK
            )
    if slot > 0:
        tl.store(states, state, mask=inside)


@kernel_with_varying("tokens", "row_stride", "requests")
def _delta_norm_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the gates of all heads last
    norm_ptr,  # [dv]
    starts_ptr,  # [B + 1]
    out_ptr,  # [T, Hv * dv], of which padding rows hold anything
    row_stride,
    requests,
    tokens,
    first,  # column of the first gate
    eps,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program finishes some tokens of one head in place."""
    await_previous(CHAINED)
    token, value_dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    column = tl.program_id(1) * VALUE + value_dim
    real = (token < tokens)[:, None] & (value_dim < VALUE)[None, :]
    live = real & (token < tl.load(starts_ptr + requests))[:, None]
    wide = token.to(tl.int64)[:, None]
    place = out_ptr + wide * HEADS * VALUE + column[None, :]
    x = tl.load(place, mask=live, other=0.0).to(tl.float32)
    gate_at = projected_ptr + wide * row_stride + first + column[None, :]
    gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + value_dim, mask=value_dim < VALUE, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / VALUE + eps)[:, None] * weight[None, :]
    gated = normed * gate / (1.0 + tl.exp(-gate))
    tl.store(place, gated.to(out_ptr.dtype.element_ty), mask=real)


def delta_extend_triton(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    saves: Tensor | None = None,
) -> Tensor:
    """Compute `delta_extend_reference` on a GPU."""
    tokens, requests, channels = projected.shape[0], slots.shape[0], conv.shape[1]
    _, heads, key, value = recurrent.shape
    served = heads * key * 2 // (channels - heads * value)
    inputs = channels + 2 * heads
    assert projected.shape[1] == inputs + heads * value, "inputs, two values per head, and gates"
    assert projected.stride(1) == 1, "the values of a token must be adjacent"
    assert 2 * heads // served * key + heads * value == channels, (
        f"{heads} heads do not make {channels} channels"
    )
    assert starts.shape == (requests + 1,), f"{tuple(starts.shape)} starts of {requests} requests"
    assert lengths.shape == (requests,), f"{tuple(lengths.shape)} lengths of {requests} requests"
    for each in (taps, a_log, dt_bias, norm, conv, recurrent, slots, starts, lengths):
        assert each.is_contiguous(), "weights, planes and indices must be contiguous"
    count = 0 if saves is None else saves.shape[1]
    if saves is not None:
        assert saves.shape == (requests, count, 2), f"{tuple(saves.shape)} saves of {requests} requests"
        assert saves.dtype == torch.int64, "slots and counts are int64"
        assert saves.is_contiguous(), "a slot and its count are adjacent"
    saved = slots if saves is None else saves
    assert recurrent.dtype == torch.float32, "states are float32"
    assert conv.dtype == projected.dtype, "kept inputs have the dtype of new ones"
    out = projected.new_empty((tokens, heads * value))
    if tokens == 0 or requests == 0:
        return out
    chunks = tokens // CHUNK + requests
    convolved = projected.new_empty((tokens, channels))
    fresh, through = (recurrent.new_empty((chunks, heads, CHUNK, size)) for size in (value, key))
    since = recurrent.new_empty((chunks, heads, CHUNK))
    options = chained(projected.device)
    sizes = {"HEADS": heads, "VALUE": value}
    keyed = {**sizes, "SERVED": served, "KEY": key, "CHUNK": CHUNK, "BLOCK_K": max(next_power_of_2(key), 16)}
    most = max(next_power_of_2(requests), REQUESTS)
    block_v = max(next_power_of_2(value), 16)
    part = min(block_v, VALUES)
    stride = projected.stride(0)
    _delta_inputs_kernel[(chunks, cdiv(channels, COLUMNS))](
        *(projected, taps, conv, slots, starts, lengths, saved, convolved),
        stride,
        requests,
        channels,
        REQUESTS=most,
        CHUNK=CHUNK,
        SAVES=count,
        BLOCK=COLUMNS,
        num_warps=4,
        **options,
    )
    _delta_within_kernel[(chunks, heads)](
        *(projected, convolved, a_log, dt_bias, starts, fresh, through, since),
        stride,
        requests,
        channels,
        REQUESTS=most,
        BLOCK_V=block_v,
        num_warps=4,
        **keyed,
        **options,
    )
    _delta_scan_kernel[(requests, heads, cdiv(value, part))](
        *(convolved, fresh, through, since, recurrent, slots, starts, lengths, saved, out),
        channels,
        SAVES=count,
        BLOCK_V=part,
        num_warps=4,
        num_stages=1,
        **keyed,
        **options,
    )
    _delta_norm_kernel[(cdiv(tokens, ROWS), heads)](
        *(projected, norm, starts, out),
        stride,
        requests,
        tokens,
        inputs,
        eps,
        BLOCK=ROWS,
        BLOCK_V=block_v,
        num_warps=4,
        **sizes,
        **options,
    )
    return out
