"""The scan over the chunks of each request, which is the only part of a prompt that is computed in order."""

from __future__ import annotations

from common.engine.ops.delta_saves import save_columns, save_state
from common.engine.ops.triton_kernel import await_previous, kernel, tl


@kernel
def _move_columns(projected_ptr, columns_ptr, begin, end, keeps, channel, channels, row_stride):  # type: ignore[no-untyped-def]
    """Replace the three inputs of some channels before the new tokens by the three before the end."""
    count = end - begin
    last = projected_ptr + (end - 3).to(tl.int64) * row_stride + channel
    columns = columns_ptr + channel * 3
    kept = tl.where(keeps, channels, 0)
    x0 = tl.load(last, mask=channel < tl.where(count >= 3, channels, 0), other=0.0)
    x1 = tl.load(last + row_stride, mask=channel < tl.where(count >= 2, channels, 0), other=0.0)
    x2 = tl.load(last + 2 * row_stride, mask=channel < tl.where(count >= 1, channels, 0), other=0.0)
    x0 += tl.load(columns + count, mask=channel < tl.where(count < 3, kept, 0), other=0.0)
    x1 += tl.load(columns + count + 1, mask=channel < tl.where(count < 2, kept, 0), other=0.0)
    x2 += tl.load(columns + count + 2, mask=channel < tl.where(count < 1, kept, 0), other=0.0)
    real = channel < channels
    # All threads have read what the stores below replace.
    tl.debug_barrier()
    tl.store(columns, x0, mask=real)
    tl.store(columns + 1, x1, mask=real)
    tl.store(columns + 2, x2, mask=real)


@kernel
def delta_scan_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the channels first
    conv_ptr,  # [slots, C, 3]
    recurrent_ptr,  # [slots, Hv, dk, dv]
    slots_ptr,  # [B]
    starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    saves_ptr,  # [B, SAVES, 2]
    keys_ptr,  # [chunks, 2 * Hk, CHUNK, BLOCK_K]
    fresh_ptr,  # [chunks, Hv, CHUNK, BLOCK_V]; becomes what the tokens add to the state
    through_ptr,  # [chunks, Hv, CHUNK, BLOCK_K]
    since_ptr,  # [chunks, Hv, CHUNK]
    states_ptr,  # [chunks, Hv, BLOCK_K, BLOCK_V]: the states before the chunks
    row_stride,
    channels,
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    SAVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    BLOCK_C: tl.constexpr,  # channels of a program
    CHAINED: tl.constexpr,
):
    """Each program carries some values of one head's state over all chunks of one request.

    It also moves the columns of some channels on, which the kernel before this has read.
    """
    await_previous(CHAINED)
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    slot = tl.load(slots_ptr + request)
    # A request that begins with these tokens has a state of zeros, whatever the slot holds.
    keeps = tl.load(lengths_ptr + request) > end - begin
    dtype = fresh_ptr.dtype.element_ty
    place, key_dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value_dim = part * PART + tl.arange(0, PART)
    inside = (key_dim < KEY)[:, None] & (value_dim < VALUE)[None, :]
    kept = recurrent_ptr + (slot * HEADS + head) * KEY * VALUE + key_dim[:, None] * VALUE + value_dim[None, :]
    limit = tl.where(keeps, KEY, 0)
    state = tl.load(kept, mask=(key_dim < limit)[:, None] & (value_dim < VALUE)[None, :], other=0.0)
    chunk = (begin // CHUNK + request).to(tl.int64)
    line = (chunk * HEADS + head) * CHUNK + place
    key_heads: tl.constexpr = HEADS // SERVED
    keys = keys_ptr + (chunk * 2 * key_heads + key_heads + head // SERVED) * CHUNK * BLOCK_K
    keys += place[:, None] * BLOCK_K + key_dim[None, :]
    throughs = through_ptr + line[:, None] * BLOCK_K + key_dim[None, :]
    added_at = fresh_ptr + line[:, None] * BLOCK_V + value_dim[None, :]
    states = states_ptr + (chunk * HEADS + head) * BLOCK_K * BLOCK_V
    states += key_dim[:, None] * BLOCK_V + value_dim[None, :]
    sinces = since_ptr + (chunk * HEADS + head) * CHUNK
    for index in range((end - begin + CHUNK - 1) // CHUNK):
        before = state.to(dtype)
        tl.store(states, before)
        added = tl.load(added_at).to(tl.float32)
        added -= tl.dot(tl.load(throughs), before, input_precision="tf32x3")
        tl.store(added_at, added.to(dtype))
        last = tl.load(sinces + CHUNK - 1)
        faded = (added * tl.exp(last - tl.load(sinces + place))[:, None]).to(dtype)
        key = tl.trans(tl.load(keys))
        state = tl.dot(key, faded, state * tl.exp(last), input_precision="tf32x3")
        keys += 2 * key_heads * CHUNK * BLOCK_K
        throughs += HEADS * CHUNK * BLOCK_K
        added_at += HEADS * CHUNK * BLOCK_V
        states += HEADS * BLOCK_K * BLOCK_V
        sinces += HEADS * CHUNK
        if SAVES:
            offset = head * KEY * VALUE + key_dim[:, None] * VALUE + value_dim[None, :]
            size = HEADS * KEY * VALUE
            save_state(
                recurrent_ptr, saves_ptr, request, index * CHUNK, offset, size, state, inside, SAVES, CHUNK
            )
    channel = (head * tl.num_programs(2) + part) * BLOCK_C + tl.arange(0, BLOCK_C)
    if SAVES:
        save_columns(projected_ptr, row_stride, conv_ptr, saves_ptr, request, begin, channel, channels, SAVES)
    if slot > 0:
        tl.store(kept, state, mask=inside)
        columns = conv_ptr + slot * channels * 3
        _move_columns(projected_ptr, columns, begin, end, keeps, channel, channels, row_stride)
