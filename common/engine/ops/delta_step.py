"""One decode step of a gated delta layer: folds accepted tokens into the state, then computes the new ones.

The state and the columns of the convolution in a slot hold the tokens up to a step's window. The window keeps the
inputs of the tokens that the last step computed; the next step first applies those that were accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.delta_heads import DeltaHeads, convolve, delta_heads, gated_norm
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

COLUMNS = 256  # channels of a program


def delta_step_reference(
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
    """Return [R * N, Hv * dv], the gated outputs of N new tokens for each of R requests.

    Args:
        projected: [R * N, C + 2 * Hv + Hv * dv] = [queries | keys | values | b | a | gates].
        taps: [C, 4] of the convolution.
        a_log: [Hv] float32; so is dt_bias.
        norm: [dv] float32, weight of the output norm, which adds `eps` to the mean square.
        conv: [slots, C, 3], the inputs before the window; mutated.
        recurrent: [slots, Hv, dk, dv] float32, the state before the window; mutated.
        window: [rows, M, C + 2 * Hv], M >= N; mutated: the first N tokens of a row become the new ones.
        slots: [R] int64 of `conv` and `recurrent`; 0: padding, whose state stays as it is.
        rows: [R] int64 of `window`; 0: padding.
        pending: [R] int64, accepted tokens of the window: 0 .. M.
    """
    count, heads, channels = len(rows), recurrent.shape[1], conv.shape[1]
    shape = (heads, recurrent.shape[2], recurrent.shape[3])
    inputs = projected.view(count, projected.shape[0] // count, -1)
    new, gate = torch.split(inputs, [channels + 2 * heads, heads * shape[2]], dim=-1)
    live = rows > 0
    old = window.index_select(0, rows)
    columns = torch.cat((conv.index_select(0, slots).transpose(1, 2), old[..., :channels]), 1)

    def parts(columns: Tensor, inputs: Tensor) -> DeltaHeads:
        b, a = inputs[..., channels:].chunk(2, dim=-1)
        return delta_heads(convolve(columns, taps), b, a, a_log, dt_bias, shape)

    state, accepted = recurrent.index_select(0, slots), parts(columns, old)
    for place in range(window.shape[1]):
        fold = (pending > place)[:, None, None, None]
        state = torch.where(fold, _moved(state, accepted, place), state)
    recurrent.index_copy_(0, slots, torch.where(live[:, None, None, None], state, 0))
    last = pending[:, None] + torch.arange(conv.shape[2], device=pending.device)
    before = columns.gather(1, last[..., None].expand(-1, -1, channels))
    kept = torch.where(live[:, None, None], before.transpose(1, 2), 0)
    conv.index_copy_(0, slots, kept)
    window[:, : new.shape[1]].index_copy_(0, rows, torch.where(live[:, None, None], new, 0))

    fresh = parts(torch.cat((before, new[..., :channels]), 1), new)
    outputs = []
    for place in range(new.shape[1]):
        state = _moved(state, fresh, place)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, fresh.query[:, place]))
    return gated_norm(torch.stack(outputs, 1), gate, norm, eps).flatten(0, 1)


def _moved(state: Tensor, tokens: DeltaHeads, place: int) -> Tensor:
    """Return the state [R, Hv, dk, dv] after one more of `tokens`."""
    key, beta = tokens.key[:, place], tokens.beta[:, place]
    state = state * tokens.decay[:, place].exp()[..., None, None]
    seen = torch.einsum("rhkv,rhk->rhv", state, key)
    change = (tokens.value[:, place] - seen) * beta[..., None]
    return state + key[..., None] * change[..., None, :]


@kernel_with_varying("row_stride")
def _delta_columns_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [R * N, ...] with the channels first
    taps_ptr,  # [C, 4]
    conv_ptr,  # [slots, C, 3]
    window_ptr,  # [rows, M, width] with the channels first
    slots_ptr,  # [R]
    rows_ptr,  # [R]
    pending_ptr,  # [R]
    out_ptr,  # [R, M + N, C]: the convolved inputs of pending and of new tokens
    row_stride,  # of `projected`
    channels,
    width,
    TOKENS: tl.constexpr,  # N
    WINDOW: tl.constexpr,  # M
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program convolves some channels of one request, and moves its columns and its window on."""
    await_previous(CHAINED)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    if row > 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        real = channel < channels
        columns = conv_ptr + tl.load(slots_ptr + request) * channels * 3 + channel * 3
        kept = window_ptr + row * WINDOW * width + channel
        out = out_ptr + request * (WINDOW + TOKENS) * channels + channel
        dtype = out_ptr.dtype.element_ty
        tap0 = tl.load(taps_ptr + channel * 4, mask=real, other=0.0).to(tl.float32)
        tap1 = tl.load(taps_ptr + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
        tap2 = tl.load(taps_ptr + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
        tap3 = tl.load(taps_ptr + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
        x0 = tl.load(columns, mask=real, other=0.0).to(tl.float32)
        x1 = tl.load(columns + 1, mask=real, other=0.0).to(tl.float32)
        x2 = tl.load(columns + 2, mask=real, other=0.0).to(tl.float32)
        for place in range(tl.load(pending_ptr + request)):
            x3 = tl.load(kept + place * width, mask=real, other=0.0).to(tl.float32)
            y = tap0 * x0 + tap1 * x1 + tap2 * x2 + tap3 * x3
            tl.store(out + place * channels, (y / (1.0 + tl.exp(-y))).to(dtype), mask=real)
            x0, x1, x2 = x1, x2, x3
        # All threads have read what the stores below replace.
        tl.debug_barrier()
        tl.store(columns, x0.to(dtype), mask=real)
        tl.store(columns + 1, x1.to(dtype), mask=real)
        tl.store(columns + 2, x2.to(dtype), mask=real)
        for place in range(TOKENS):
            new = tl.load(
                projected_ptr + (request * TOKENS + place) * row_stride + channel, mask=real, other=0.0
            )
            tl.store(kept + place * width, new, mask=real)
            x3 = new.to(tl.float32)
            y = tap0 * x0 + tap1 * x1 + tap2 * x2 + tap3 * x3
            tl.store(out + (WINDOW + place) * channels, (y / (1.0 + tl.exp(-y))).to(dtype), mask=real)
            x0, x1, x2 = x1, x2, x3


@kernel
def delta_moved(state, key, value, b, a, a_log, dt_bias):  # type: ignore[no-untyped-def]
    """Return the state [dk, dv] after a token: key [dk] of unit length, value [dv], the others scalars; float32."""
    raw = a + dt_bias
    softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    state = state * tl.exp(-tl.exp(a_log) * softplus)
    seen = tl.sum(state * key[:, None], axis=0)
    return state + key[:, None] * ((value - seen) / (1.0 + tl.exp(-b)))[None, :]


@kernel
def unit_vector(place, dim, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load SIZE values and return them divided by their length, float32."""
    x = tl.load(place + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)  # L2_EPS


@kernel_with_varying("row_stride")
def _delta_step_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [R * N, C + 2 * Hv + Hv * dv]
    convolved_ptr,  # [R, M + N, C]
    a_log_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    norm_ptr,  # [dv]
    recurrent_ptr,  # [slots, Hv, dk, dv]
    window_ptr,  # [rows, M, C + 2 * Hv]
    slots_ptr,  # [R]
    rows_ptr,  # [R]
    pending_ptr,  # [R]
    out_ptr,  # [R * N, Hv * dv]
    row_stride,  # of `projected`
    eps,
    channels,
    HEADS: tl.constexpr,  # Hv
    SERVED: tl.constexpr,  # value heads of a key head
    KEY: tl.constexpr,  # dk
    VALUE: tl.constexpr,  # dv
    TOKENS: tl.constexpr,  # N
    WINDOW: tl.constexpr,  # M
    BLOCK_K: tl.constexpr,  # KEY rounded up to a power of two
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program reads and writes the state of one value head of one request once."""
    await_previous(CHAINED)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    key_dim, value_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    real = value_dim < VALUE
    dtype = out_ptr.dtype.element_ty
    out = out_ptr + request * TOKENS * HEADS * VALUE + head * VALUE + value_dim
    if row == 0:
        for place in range(TOKENS):
            tl.store(out + place * HEADS * VALUE, tl.zeros((BLOCK_V,), dtype), mask=real)
    else:
        width = channels + 2 * HEADS
        tile = key_dim[:, None] * VALUE + value_dim[None, :]
        inside = (key_dim < KEY)[:, None] & real[None, :]
        slot = tl.load(slots_ptr + request)
        states = recurrent_ptr + (slot * HEADS + head) * KEY * VALUE + tile
        state = tl.load(states, mask=inside, other=0.0)
        a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
        keys = HEADS // SERVED * KEY
        convolved = convolved_ptr + request * (WINDOW + TOKENS) * channels
        query_at = head // SERVED * KEY
        value_at = 2 * keys + head * VALUE
        kept = window_ptr + row * WINDOW * width + channels + head
        for place in range(tl.load(pending_ptr + request)):
            token = convolved + place * channels
            key = unit_vector(token + keys + query_at, key_dim, KEY)
            value = tl.load(token + value_at + value_dim, mask=real, other=0.0).to(tl.float32)
            b = tl.load(kept + place * width).to(tl.float32)
            a = tl.load(kept + place * width + HEADS).to(tl.float32)
            state = delta_moved(state, key, value, b, a, a_log, dt_bias)
        # All threads have read what the stores below replace.
        tl.debug_barrier()
        tl.store(states, state, mask=inside)
        norm = tl.load(norm_ptr + value_dim, mask=real, other=0.0)
        for place in range(TOKENS):
            token = convolved + (WINDOW + place) * channels
            new = projected_ptr + (request * TOKENS + place) * row_stride + channels
            query = unit_vector(token + query_at, key_dim, KEY) * KEY**-0.5
            key = unit_vector(token + keys + query_at, key_dim, KEY)
            value = tl.load(token + value_at + value_dim, mask=real, other=0.0).to(tl.float32)
            b, a = tl.load(new + head), tl.load(new + HEADS + head)
            tl.store(kept + place * width, b)
            tl.store(kept + place * width + HEADS, a)
            state = delta_moved(state, key, value, b.to(tl.float32), a.to(tl.float32), a_log, dt_bias)
            seen = tl.sum(state * query[:, None], axis=0).to(dtype).to(tl.float32)
            gate = tl.load(new + 2 * HEADS + head * VALUE + value_dim, mask=real, other=0.0).to(tl.float32)
            normed = seen * tl.rsqrt(tl.sum(seen * seen, axis=0) / VALUE + eps) * norm
            gated = normed * gate / (1.0 + tl.exp(-gate))
            tl.store(out + place * HEADS * VALUE, gated.to(dtype), mask=real)


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
    convolved = projected.new_empty((count, most + tokens, channels))
    options = chained(projected.device)
    block = min(COLUMNS, next_power_of_2(channels))
    _delta_columns_kernel[(count, cdiv(channels, block))](
        projected,
        taps,
        conv,
        window,
        slots,
        rows,
        pending,
        convolved,
        projected.stride(0),
        channels,
        width,
        TOKENS=tokens,
        WINDOW=most,
        BLOCK=block,
        num_warps=4,
        **options,
    )
    _delta_step_kernel[(count, heads)](
        projected,
        convolved,
        a_log,
        dt_bias,
        norm,
        recurrent,
        window,
        slots,
        rows,
        pending,
        out,
        projected.stride(0),
        eps,
        channels,
        HEADS=heads,
        SERVED=served,
        KEY=key,
        VALUE=value,
        TOKENS=tokens,
        WINDOW=most,
        BLOCK_K=next_power_of_2(key),
        BLOCK_V=next_power_of_2(value),
        num_warps=8,
        **options,
    )
    return out


def _fake(
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
    return projected.new_empty((projected.shape[0], recurrent.shape[1] * recurrent.shape[3]))


delta_step = register_op(
    "delta_step",
    delta_step_reference,
    mutates=("conv", "recurrent", "window"),
    fake=_fake,
    cuda=delta_step_triton,
)
