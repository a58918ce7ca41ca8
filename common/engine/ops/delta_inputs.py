"""The inputs of the scan over chunks: convolved heads, and the solved system of each head in each chunk."""

from __future__ import annotations

from common.engine.ops.triton_kernel import await_previous, kernel, kernel_with_varying, tl


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


@kernel
def _convolve_head(  # type: ignore[no-untyped-def]
    projected_ptr,
    taps_ptr,
    columns_ptr,  # the request's inputs before `begin`, which count if `keeps`
    out_ptr,  # [CHUNK, BLOCK] of this head and chunk
    first,  # channel
    scale,
    at,
    begin,
    end,
    keeps,
    row_stride,
    SIZE: tl.constexpr,  # channels
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Store silu of the convolution of a head in a chunk, zero past the end; if UNIT, divided by lengths, and scaled.

    Each row of the tile is a run of RUN tokens, of which the last three inputs stay in registers.
    """
    place, dim = tl.arange(0, CHUNK // RUN) * RUN, tl.arange(0, BLOCK)[None, :]
    token, real, channel = (at + place)[:, None], dim < SIZE, first + dim
    x = projected_ptr + token.to(tl.int64) * row_stride + channel
    tap0 = tl.load(taps_ptr + channel * 4, mask=real, other=0.0).to(tl.float32)
    tap1 = tl.load(taps_ptr + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
    tap2 = tl.load(taps_ptr + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
    tap3 = tl.load(taps_ptr + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
    # Earlier inputs of the same request may be past its end only where nothing is stored.
    x0 = tl.load(x - 3 * row_stride, mask=real & (token - 3 >= begin) & (token - 3 < end), other=0.0)
    x1 = tl.load(x - 2 * row_stride, mask=real & (token - 2 >= begin) & (token - 2 < end), other=0.0)
    x2 = tl.load(x - row_stride, mask=real & (token - 1 >= begin) & (token - 1 < end), other=0.0)
    if keeps & (at == begin):
        old = real & (token == begin)
        x0 += tl.load(columns_ptr + channel * 3 + token - begin, mask=old, other=0.0)
        x1 += tl.load(columns_ptr + channel * 3 + 1 + token - begin, mask=old, other=0.0)
        x2 += tl.load(columns_ptr + channel * 3 + 2 + token - begin, mask=old, other=0.0)
    x0, x1, x2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    for step in tl.static_range(RUN):
        x3 = tl.load(x + step * row_stride, mask=real & (token + step < end), other=0.0).to(tl.float32)
        y = tap0 * x0 + tap1 * x1 + tap2 * x2 + tap3 * x3
        y = tl.where(token + step < end, y / (1.0 + tl.exp(-y)), 0.0).to(dtype)
        if UNIT:
            wide = y.to(tl.float32)
            y = (wide * (tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * scale)[:, None]).to(dtype)  # L2_EPS
        tl.store(out_ptr + (place + step)[:, None] * BLOCK + dim, y)
        x0, x1, x2 = x1, x2, x3


@kernel_with_varying("requests")
def delta_heads_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the channels first
    taps_ptr,  # [C, 4]
    conv_ptr,  # [slots, C, 3]
    slots_ptr,  # [B]
    starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    keys_ptr,  # [chunks, 2 * Hk, CHUNK, BLOCK_K]: queries and keys of unit length, queries times dk ** -0.5
    values_ptr,  # [chunks, Hv, CHUNK, BLOCK_V]
    row_stride,
    requests,
    channels,
    HEADS: tl.constexpr,  # Hv
    SERVED: tl.constexpr,  # value heads of a key head
    KEY: tl.constexpr,  # dk
    VALUE: tl.constexpr,  # dv
    REQUESTS: tl.constexpr,  # at least `requests`
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program convolves one head of queries, keys or values in one chunk."""
    await_previous(CHAINED)
    index, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, begin, end, at = chunk_of(starts_ptr, chunk.to(tl.int32), requests, REQUESTS, CHUNK)
    if at < end:
        # Columns of a request that begins with these tokens hold anything.
        keeps = tl.load(lengths_ptr + request) > end - begin
        columns = conv_ptr + tl.load(slots_ptr + request) * channels * 3
        key_heads: tl.constexpr = 2 * (HEADS // SERVED)
        if index < key_heads:
            scale = tl.where(index < HEADS // SERVED, KEY**-0.5, 1.0)
            _convolve_head(
                projected_ptr, taps_ptr, columns, keys_ptr + (chunk * key_heads + index) * CHUNK * BLOCK_K,
                index * KEY, scale, at, begin, end, keeps, row_stride, KEY, BLOCK_K, CHUNK, RUN, True,
            )  # fmt: skip
        else:
            head = index - key_heads
            _convolve_head(
                projected_ptr, taps_ptr, columns, values_ptr + (chunk * HEADS + head) * CHUNK * BLOCK_V,
                key_heads * KEY + head * VALUE, 1.0, at, begin, end, keeps, row_stride, VALUE, BLOCK_V, CHUNK, RUN,
                False,
            )  # fmt: skip


@kernel
def _inverse(system, place, LEVELS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inverse of 1 + system [2 ** LEVELS, 2 ** LEVELS], which is zero on and above the diagonal.

    The inverses of two diagonal blocks and the block below the first give the inverse of a block twice as large. All
    blocks of one size are computed at once, in products of the whole matrix with operands in DTYPE. Values do not
    exceed 1, so that float16 holds them, with more digits than bfloat16.
    """
    row, column = place[:, None], place[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        rounded = inverse.to(DTYPE)
        product = tl.dot(rounded, tl.where(below, system, 0.0).to(DTYPE), input_precision="tf32x3")
        inverse -= tl.dot(product.to(DTYPE), rounded, input_precision="tf32x3")
    return inverse


@kernel_with_varying("requests")
def delta_solve_kernel(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, C + 2 * Hv + ...]
    a_log_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    starts_ptr,  # [B + 1]
    keys_ptr,  # [chunks, 2 * Hk, CHUNK, BLOCK_K]
    fresh_ptr,  # [chunks, Hv, CHUNK, BLOCK_V]: the values; becomes what tokens add, were the state zero
    through_ptr,  # [chunks, Hv, CHUNK, BLOCK_K]: how they see the state before the chunk
    since_ptr,  # [chunks, Hv, CHUNK]: decay from the start of the chunk
    row_stride,
    requests,
    channels,
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT: tl.constexpr,  # float32 inputs
    CHAINED: tl.constexpr,
):
    """Each program solves the triangular system of one value head in one chunk."""
    await_previous(CHAINED)
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, end, at = chunk_of(starts_ptr, chunk.to(tl.int32), requests, REQUESTS, CHUNK)
    if at < end:
        dtype = projected_ptr.dtype.element_ty
        place, key_dim, value_dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        held = at + place < end
        gates = projected_ptr + (at + place).to(tl.int64) * row_stride + channels + head
        b = tl.load(gates, mask=held, other=0.0).to(tl.float32)
        raw = tl.load(gates + HEADS, mask=held, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
        key_heads: tl.constexpr = HEADS // SERVED
        shared = (chunk * 2 * key_heads + key_heads + head // SERVED) * CHUNK + place
        key = tl.load(keys_ptr + shared[:, None] * BLOCK_K + key_dim[None, :])
        line = (chunk * HEADS + head) * CHUNK + place
        fresh_at = fresh_ptr + line[:, None] * BLOCK_V + value_dim[None, :]
        value = tl.load(fresh_at)
        beta = 1.0 / (1.0 + tl.exp(-b))
        softplus = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        since = tl.cumsum(tl.where(held, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0), axis=0)
        tl.store(since_ptr + line, since)
        between = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0)) * beta[:, None]
        system = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        inverse = _inverse(system, place, LEVELS, tl.float32 if EXACT else tl.float16)
        # The factors of keys and values are those of the columns of the inverse.
        weighted = (inverse * (beta * tl.exp(since))[None, :]).to(dtype)
        through = tl.dot(weighted, key, input_precision="tf32x3")
        tl.store(through_ptr + line[:, None] * BLOCK_K + key_dim[None, :], through.to(dtype))
        fresh = tl.dot((inverse * beta[None, :]).to(dtype), value, input_precision="tf32x3")
        tl.store(fresh_at, fresh.to(dtype))
