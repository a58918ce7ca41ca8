"""The gated outputs of all tokens of a prompt, from the states before their chunks."""

from __future__ import annotations

from common.engine.ops.delta_inputs import chunk_of
from common.engine.ops.triton_kernel import await_previous, kernel_with_varying, tl


@kernel_with_varying("requests", "tokens")
def delta_outputs_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the gates of all heads last
    norm_ptr,  # [dv]
    starts_ptr,  # [B + 1]
    keys_ptr,  # [chunks, 2 * Hk, CHUNK, BLOCK_K]: queries, then keys
    added_ptr,  # [chunks, Hv, CHUNK, BLOCK_V]
    since_ptr,  # [chunks, Hv, CHUNK]
    states_ptr,  # [chunks, Hv, BLOCK_K, BLOCK_V]
    out_ptr,  # [T, Hv * dv]
    row_stride,
    requests,
    tokens,
    first_gate,  # column
    eps,
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    VALUE: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEP: tl.constexpr,  # key dimensions at a time
    CHAINED: tl.constexpr,
):
    """Each program computes one head in one chunk. Those of the last request also clear the rows past it."""
    await_previous(CHAINED)
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, _, end, at = chunk_of(starts_ptr, chunk.to(tl.int32), requests, REQUESTS, CHUNK)
    dtype = out_ptr.dtype.element_ty
    place, value_dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    token = at + place
    wide = token.to(tl.int64)[:, None]
    real = (value_dim < VALUE)[None, :]
    out_at = out_ptr + wide * HEADS * VALUE + head * VALUE + value_dim[None, :]
    if at < end:
        step = tl.arange(0, STEP)
        line = place[:, None] * BLOCK_K + step[None, :]
        key_heads: tl.constexpr = HEADS // SERVED
        queries = keys_ptr + (chunk * 2 * key_heads + head // SERVED) * CHUNK * BLOCK_K + line
        own = (chunk * HEADS + head) * CHUNK
        state_at = states_ptr + (chunk * HEADS + head) * BLOCK_K * BLOCK_V
        state_at += step[:, None] * BLOCK_V + value_dim[None, :]
        out = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        seen = tl.zeros((CHUNK, CHUNK), tl.float32)
        for dim in range(0, BLOCK_K, STEP):
            query = tl.load(queries + dim)
            key = tl.load(queries + key_heads * CHUNK * BLOCK_K + dim)
            state = tl.load(state_at + dim * BLOCK_V)
            out = tl.dot(query, state, out, input_precision="tf32x3")
            seen = tl.dot(query, tl.trans(key), seen, input_precision="tf32x3")
        since = tl.load(since_ptr + own + place)
        between = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
        seen = tl.where(place[:, None] >= place[None, :], seen * between, 0.0).to(dtype)
        added = tl.load(added_ptr + (own + place)[:, None] * BLOCK_V + value_dim[None, :])
        out = tl.dot(seen, added, out * tl.exp(since)[:, None], input_precision="tf32x3")
        live = (token < end)[:, None] & real
        gate_at = projected_ptr + wide * row_stride + first_gate + head * VALUE + value_dim[None, :]
        gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + value_dim, mask=value_dim < VALUE, other=0.0)
        # Rounded where a separate kernel would round.
        out = out.to(dtype).to(tl.float32)
        normed = out * tl.rsqrt(tl.sum(out * out, axis=1) / VALUE + eps)[:, None] * weight[None, :]
        tl.store(out_at, (normed * gate / (1.0 + tl.exp(-gate))).to(dtype), mask=live)
    if request == requests - 1:
        past = ((token >= end) & (token < tokens))[:, None] & real
        tl.store(out_at, tl.zeros((CHUNK, BLOCK_V), dtype), mask=past)
