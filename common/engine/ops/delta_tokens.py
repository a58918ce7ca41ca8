"""The kernels of a decode step of a gated delta layer, for `delta_step`, which describes the computation.

Two launches: one over the states, of which each program reads and writes some values of a head once; then one that
needs all values of a head (the norm), or that replaces what the first one reads (columns and window).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    kernel,
    launch_next,
    multiprocessors,
    next_power_of_2,
    tl,
)

COLUMNS = 512  # channels of a program of the second launch
NORMED = 4  # heads of a program of the second launch


@kernel
def _kept_input(columns, kept, position, width, channel, end):  # type: ignore[no-untyped-def]
    """Return the inputs of the channels before `end`, `position` tokens after the begin of the window."""
    old = tl.load(columns + position + 3, mask=channel < tl.where(position < 0, end, 0), other=0.0)
    return old + tl.load(kept + position * width, mask=channel < tl.where(position >= 0, end, 0), other=0.0)


@kernel
def _taps(taps_ptr, channel, real):  # type: ignore[no-untyped-def]
    """Return the four taps of some channels, oldest first."""
    tap = taps_ptr + channel * 4
    tap0 = tl.load(tap, mask=real, other=0.0)
    tap1 = tl.load(tap + 1, mask=real, other=0.0)
    tap2 = tl.load(tap + 2, mask=real, other=0.0)
    tap3 = tl.load(tap + 3, mask=real, other=0.0)
    return tap0, tap1, tap2, tap3


@kernel
def _columns(columns, channel, real):  # type: ignore[no-untyped-def]
    """Return the inputs of some channels before the window, oldest first."""
    x0 = tl.load(columns + channel * 3, mask=real, other=0.0)
    x1 = tl.load(columns + channel * 3 + 1, mask=real, other=0.0)
    x2 = tl.load(columns + channel * 3 + 2, mask=real, other=0.0)
    return x0, x1, x2


@kernel
def _convolved(x0, x1, x2, x3, taps, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return silu of the convolution at x3, rounded, float32."""
    tap0, tap1, tap2, tap3 = taps
    y = tap0.to(tl.float32) * x0.to(tl.float32) + tap1.to(tl.float32) * x1.to(tl.float32)
    y = y + tap2.to(tl.float32) * x2.to(tl.float32) + tap3.to(tl.float32) * x3.to(tl.float32)
    return (y / (1.0 + tl.exp(-y))).to(DTYPE).to(tl.float32)


@kernel
def _unit(x):  # type: ignore[no-untyped-def]
    """Return a vector divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)  # L2_EPS


@kernel
def _gates(b, a, rate, dt_bias):  # type: ignore[no-untyped-def]
    """Return how far the state moves to the new value, and what remains of the old one."""
    raw = a.to(tl.float32) + dt_bias
    softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), tl.exp(rate * softplus)


@kernel
def _delta_step_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [R * N, C + 2 * Hv + Hv * dv]
    taps_ptr,  # [C, 4]
    a_log_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    conv_ptr,  # [slots, C, 3]
    recurrent_ptr,  # [slots, Hv, dk, dv]
    window_ptr,  # [rows, M, C + 2 * Hv]
    slots_ptr,  # [R]
    rows_ptr,  # [R]
    pending_ptr,  # [R]
    out_ptr,  # [R * N, Hv * dv]: what the queries see, rounded
    row_stride,  # row stride in `projected`
    channels,
    HEADS: tl.constexpr,  # Hv
    SERVED: tl.constexpr,  # value heads of a key head
    KEY: tl.constexpr,  # dk
    VALUE: tl.constexpr,  # dv
    TOKENS: tl.constexpr,  # N
    WINDOW: tl.constexpr,  # M
    BLOCK_K: tl.constexpr,  # KEY rounded up to a power of two
    PART: tl.constexpr,  # values of a program
    CHAINED: tl.constexpr,
):
    """Each program applies the pending tokens to its part of a state, stores it, and computes the new tokens.

    It reads all but the new tokens before it waits for them; see `delta_step_triton`. The inputs of a token are loaded
    while the one before it is computed.
    """
    launch_next(CHAINED)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, slot, pending = (
        tl.load(rows_ptr + request),
        tl.load(slots_ptr + request),
        tl.load(pending_ptr + request),
    )
    if row == 0:
        await_results(CHAINED)
        return
    dtype = projected_ptr.dtype.element_ty
    key_dim, value_dim = tl.arange(0, BLOCK_K), tl.program_id(2) * PART + tl.arange(0, PART)
    real_key, real_value = key_dim < KEY, value_dim < VALUE
    inside = real_key[:, None] & real_value[None, :]
    states = recurrent_ptr + (slot * HEADS + head) * KEY * VALUE
    states += key_dim[:, None] * VALUE + value_dim[None, :]
    state = tl.load(states, mask=inside, other=0.0)
    width = channels + 2 * HEADS
    query_at = head // SERVED * KEY + key_dim
    key_at = HEADS // SERVED * KEY + query_at
    value_at = 2 * (HEADS // SERVED) * KEY + head * VALUE + value_dim
    columns, kept = conv_ptr + slot * channels * 3, window_ptr + row * WINDOW * width
    key_taps, value_taps = _taps(taps_ptr, key_at, real_key), _taps(taps_ptr, value_at, real_value)
    query_taps = _taps(taps_ptr, query_at, real_key)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    k0, k1, k2 = _columns(columns, key_at, real_key)
    v0, v1, v2 = _columns(columns, value_at, real_value)
    k3 = tl.load(kept + key_at, mask=real_key & (pending > 0), other=0.0)
    v3 = tl.load(kept + value_at, mask=real_value & (pending > 0), other=0.0)
    b, a = tl.load(kept + channels + head), tl.load(kept + channels + HEADS + head)
    query_columns = columns + query_at * 3
    q0 = _kept_input(query_columns, kept + query_at, pending - 3, width, key_dim, KEY)
    q1 = _kept_input(query_columns, kept + query_at, pending - 2, width, key_dim, KEY)
    q2 = _kept_input(query_columns, kept + query_at, pending - 1, width, key_dim, KEY)
    await_results(CHAINED)

    token = projected_ptr + request * TOKENS * row_stride
    new_query = tl.load(token + query_at, mask=real_key, other=0.0)
    new_key = tl.load(token + key_at, mask=real_key, other=0.0)
    new_value = tl.load(token + value_at, mask=real_value, other=0.0)
    new_b, new_a = tl.load(token + channels + head), tl.load(token + channels + HEADS + head)
    rate = -tl.exp(a_log)
    for place in range(pending):
        beta, decay = _gates(b, a, rate, dt_bias)
        key = _unit(_convolved(k0, k1, k2, k3, key_taps, dtype))
        value = _convolved(v0, v1, v2, v3, value_taps, dtype)
        k0, k1, k2, v0, v1, v2 = k1, k2, k3, v1, v2, v3
        if WINDOW > 1:
            more = place + 1 < pending
            token = kept + (place + 1) * width
            k3 = tl.load(token + key_at, mask=real_key & more, other=0.0)
            v3 = tl.load(token + value_at, mask=real_value & more, other=0.0)
            b = tl.load(token + channels + head, mask=more, other=0.0)
            a = tl.load(token + channels + HEADS + head, mask=more, other=0.0)
        state *= decay
        change = (value - tl.sum(state * key[:, None], axis=0)) * beta
        state += key[:, None] * change[None, :]
    # All threads have read what the stores below replace.
    tl.debug_barrier()
    tl.store(states, state, mask=inside)
    for place in tl.static_range(TOKENS):
        q3, k3, v3 = new_query, new_key, new_value
        beta, decay = _gates(new_b, new_a, rate, dt_bias)
        if place + 1 < TOKENS:
            token = projected_ptr + (request * TOKENS + place + 1) * row_stride
            new_query = tl.load(token + query_at, mask=real_key, other=0.0)
            new_key = tl.load(token + key_at, mask=real_key, other=0.0)
            new_value = tl.load(token + value_at, mask=real_value, other=0.0)
            new_b, new_a = tl.load(token + channels + head), tl.load(token + channels + HEADS + head)
        query = _unit(_convolved(q0, q1, q2, q3, query_taps, dtype)) * KEY**-0.5
        key = _unit(_convolved(k0, k1, k2, k3, key_taps, dtype))
        value = _convolved(v0, v1, v2, v3, value_taps, dtype)
        state *= decay
        change = (value - tl.sum(state * key[:, None], axis=0)) * beta
        seen = tl.sum(state * query[:, None], axis=0) + tl.sum(query * key, axis=0) * change
        if place + 1 < TOKENS:
            state += key[:, None] * change[None, :]
        line = out_ptr + (request * TOKENS + place) * HEADS * VALUE + head * VALUE
        tl.store(line + value_dim, seen.to(dtype), mask=real_value)
        q0, q1, q2, k0, k1, k2, v0, v1, v2 = q1, q2, q3, k1, k2, k3, v1, v2, v3


@kernel
def _delta_finish_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [R * N, C + 2 * Hv + Hv * dv]
    norm_ptr,  # [dv]
    conv_ptr,  # [slots, C, 3]
    window_ptr,  # [rows, M, C + 2 * Hv]
    slots_ptr,  # [R]
    rows_ptr,  # [R]
    pending_ptr,  # [R]
    out_ptr,  # [R * N, Hv * dv]
    row_stride,  # row stride in `projected`
    channels,
    eps,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a program
    CHAINED: tl.constexpr,
):
    """The first programs of a request finish some heads in place, the others move columns and window on.

    As in `_delta_step_kernel`, the planes are read before the wait.
    """
    launch_next(CHAINED)
    request, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    width = channels + 2 * HEADS
    norms: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    if index < norms:
        head, value_dim = index * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
        real = (head < HEADS)[:, None] & (value_dim < VALUE)[None, :]
        live = (head < tl.where(row > 0, HEADS, 0))[:, None] & (value_dim < VALUE)[None, :]
        column = head[:, None] * VALUE + value_dim[None, :]
        weight = tl.load(norm_ptr + value_dim, mask=value_dim < VALUE, other=0.0)
        await_results(CHAINED)
        for place in range(TOKENS):
            token = request * TOKENS + place
            at = out_ptr + token * HEADS * VALUE + column
            x = tl.load(at, mask=live, other=0.0).to(tl.float32)
            gate = tl.load(projected_ptr + token * row_stride + width + column, mask=live, other=0.0)
            gate = gate.to(tl.float32)
            normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / VALUE + eps)[:, None] * weight[None, :]
            tl.store(at, (normed * gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=real)
    elif row == 0:
        await_results(CHAINED)
    else:
        channel = (index - norms) * BLOCK + tl.arange(0, BLOCK)
        real, both = channel < channels, channel < width
        columns = conv_ptr + tl.load(slots_ptr + request) * channels * 3 + channel * 3
        kept = window_ptr + row * WINDOW * width + channel
        pending = tl.load(pending_ptr + request)
        x0 = _kept_input(columns, kept, pending - 3, width, channel, channels)
        x1 = _kept_input(columns, kept, pending - 2, width, channel, channels)
        x2 = _kept_input(columns, kept, pending - 1, width, channel, channels)
        await_results(CHAINED)
        # All threads have read what the stores below replace.
        tl.debug_barrier()
        tl.store(columns, x0, mask=real)
        tl.store(columns + 1, x1, mask=real)
        tl.store(columns + 2, x2, mask=real)
        for place in range(TOKENS):
            new = tl.load(projected_ptr + (request * TOKENS + place) * row_stride + channel, mask=both)
            tl.store(kept + place * width, new, mask=both)


class StepTiles(NamedTuple):
    """The division of a step's states among programs."""

    part: int  # values of a head in a program
    warps: int
    registers: int  # limit per thread, so that more programs run at once


def choose_step(heads: int, key: int, value: int, processors: int) -> StepTiles:
    """Choose tiles as measured on an H200 (tests/bench/NOTES.md).

    Below, `size` is how many numbers of a state a program keeps.

    Args:
        heads: value heads of all requests together.
        key: numbers of a key, a power of two; so is value.
    """
    size, registers = (4096, 168) if heads < 2 * processors else (8192, 255)
    return StepTiles(min(max(size // key, 1), value), 2, registers)


def delta_step_triton(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    window: Tensor,
    slots: Tensor,
    rows: Tensor,
    pending: Tensor,
) -> Tensor:
    """Compute `delta_step_reference` on a GPU.

    Its kernels read the planes before they wait for earlier kernels. So after a kernel that writes the planes there
    must be one that is not launched with `chained`, such as those at the begin of each forward.
    """
    count, channels = rows.shape[0], conv.shape[1]
    _, heads, key, value = recurrent.shape
    most, width = window.shape[1:]
    out = projected.new_empty((projected.shape[0], heads * value))
    if count == 0:
        return out
    tokens = projected.shape[0] // count
    served = heads * key * 2 // (channels - heads * value)
    assert projected.shape[0] == count * tokens, f"{projected.shape[0]} tokens of {count} requests"
    assert projected.shape[1] == width + heads * value, "inputs, two values per head, and gates"
    assert projected.stride(1) == 1, "the values of a token must be adjacent"
    assert width == channels + 2 * heads, f"a window of {width} values for {channels} channels"
    assert tokens <= most, f"{tokens} new tokens, the window has {most}"
    assert 2 * heads // served * key + heads * value == channels, (
        f"{heads} heads do not make {channels} channels"
    )
    for each in (taps, a_log, dt_bias, norm, conv, recurrent, window, slots, rows, pending):
        assert each.is_contiguous(), "weights, planes and row indices must be contiguous"
    assert recurrent.dtype == torch.float32, "states are float32"
    assert conv.dtype == window.dtype == projected.dtype, "kept inputs have the dtype of new ones"
    block_v = next_power_of_2(value)
    block_k = next_power_of_2(key)
    tiles = choose_step(count * heads, block_k, block_v, multiprocessors(projected.device))
    options = chained(projected.device)
    sizes = {"HEADS": heads, "VALUE": value, "TOKENS": tokens, "WINDOW": most}
    _delta_step_kernel[(count, heads, block_v // tiles.part)](
        *(projected, taps, a_log, dt_bias, conv, recurrent, window, slots, rows, pending, out),
        projected.stride(0),
        channels,
        SERVED=served,
        KEY=key,
        BLOCK_K=block_k,
        PART=tiles.part,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **sizes,
        **options,
    )
    block_h, block = min(NORMED, next_power_of_2(heads)), min(COLUMNS, next_power_of_2(width))
    _delta_finish_kernel[(count, cdiv(heads, block_h) + cdiv(width, block))](
        *(projected, norm, conv, window, slots, rows, pending, out),
        projected.stride(0),
        channels,
        eps,
        BLOCK_H=block_h,
        BLOCK_V=block_v,
        BLOCK=block,
        num_warps=4,
        **sizes,
        **options,
    )
    return out
