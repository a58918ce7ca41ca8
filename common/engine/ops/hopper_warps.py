"""Divides a program of `hopper_attention` among its warps: one copies pages, and two groups of four multiply."""

from __future__ import annotations

from common.engine.ops.triton_kernel import gl, gluon_kernel, hopper, thread_barrier, tl


@gluon_kernel()
def _copy_block(  # type: ignore[no-untyped-def]
    plane, pages, full, table, block, length, column, slots, stage,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy the keys or values of a block into a stage of the ring; the barrier `full` completes when they are there."""
    hopper.mbarrier.expect(full, BLOCK_N * D * 2)
    COUNT: gl.constexpr = BLOCK_N // PAGE
    for index in gl.static_range(COUNT):
        position = block * BLOCK_N + index * PAGE
        page = gl.load(table + position // PAGE, mask=position < length, other=0)
        # Past the end of the plane there are zeros.
        slot = gl.where(position < length, page * PAGE, slots)
        for part in gl.static_range(D // 64):
            place = pages.index((stage * (D // 64) + part) * COUNT + index)
            hopper.tma.async_copy_global_to_shared(plane, [slot, column + part * 64], full, place)


@gluon_kernel()
def _clear_tail(lines, live, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set the values of stage 0 that follow the first `live` in their page to zero, since 0 * NaN is NaN.

    `lines` is the ring of values as groups of 8 tokens and 64 columns.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for group in range(live // 8, gl.cdiv(live, PAGE) * PAGE // 8):
        row = group * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
        for part in gl.static_range(D // 64):
            place = lines.index(part * (BLOCK_N // 8) + group)
            value = place.load(layout)
            place.store(gl.where((row < live)[:, None], value, 0.0))
    hopper.fence_async_shared()


@gluon_kernel()
def copy(  # type: ignore[no-untyped-def]
    planes, pages, lines, barriers, table, last, blocks, length, column, slots,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy `blocks` blocks of keys and values, from the block `last` backwards, as stages become empty.

    The block `last` may end in the middle of a page, so the rest of its values is cleared before they are used.
    """
    key_plane, value_plane = planes
    key_pages, value_pages = pages
    key_full, key_empty, value_full, value_empty, uncleared = barriers
    _copy_block(
        key_plane, key_pages, key_full.index(0), table, last, length, column, slots, 0, PAGE, D, BLOCK_N
    )
    _copy_block(
        value_plane, value_pages, uncleared.index(0), table, last, length, column, slots, 0, PAGE, D, BLOCK_N
    )
    hopper.mbarrier.wait(uncleared.index(0), 0)
    live = length - last * BLOCK_N
    if live < BLOCK_N:
        _clear_tail(lines, live, PAGE, D, BLOCK_N)
    hopper.mbarrier.arrive(value_full.index(0), count=1)
    for step in range(1, blocks):
        stage, parity, block = step % STAGES, (step // STAGES) & 1, last - step
        hopper.mbarrier.wait(key_empty.index(stage), parity ^ 1)
        _copy_block(
            *(key_plane, key_pages, key_full.index(stage), table, block, length, column, slots, stage),
            *(PAGE, D, BLOCK_N),
        )
        hopper.mbarrier.wait(value_empty.index(stage), parity ^ 1)
        _copy_block(
            *(value_plane, value_pages, value_full.index(stage), table, block, length, column, slots, stage),
            *(PAGE, D, BLOCK_N),
        )


@gluon_kernel()
def _online_softmax(  # type: ignore[no-untyped-def]
    score, most, total, query_position, block, scale_log2,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of a block, the new maxima and sums, and the factors of the output so far."""
    if MASKED:
        position = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        score = gl.where(position[None, :] <= query_position[:, None], score, float("-inf"))
    new_most = gl.maximum(most, gl.max(score, axis=1))
    shift = new_most * scale_log2
    if MASKED:
        # A row may not have seen any key yet.
        shift = gl.where(new_most == float("-inf"), 0.0, shift)
    probability = gl.exp2(score * scale_log2 - shift[:, None])
    shrink = gl.exp2(most * scale_log2 - shift)
    return probability, new_most, total * shrink + gl.sum(probability, axis=1), shrink


@gluon_kernel()
def _step(  # type: ignore[no-untyped-def]
    state, step, last, query, rings, barriers, query_position, scale_log2,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SCORES: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Multiply the keys of a step and the values of the step before it.

    Probabilities are carried in float32: 16-bit values that are carried are packed and unpacked in every step.
    """
    probability, out, most, total = state
    keys, values = rings
    key_full, key_empty, value_full, value_empty, _uncleared = barriers
    stage, before = step % STAGES, (step - 1) % STAGES
    hopper.mbarrier.wait(key_full.index(stage), (step // STAGES) & 1)
    none = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    score = hopper.warpgroup_mma(query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    left = gl.convert_layout(probability.to(query.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    hopper.mbarrier.wait(value_full.index(before), ((step - 1) // STAGES) & 1)
    out = hopper.warpgroup_mma(left, values.index(before), out, is_async=True)
    score = hopper.warpgroup_mma_wait(1, deps=(score,))
    hopper.mbarrier.arrive(key_empty.index(stage), count=1)
    probability, most, total, shrink = _online_softmax(
        score, most, total, query_position, last - step, scale_log2, MASKED, BLOCK_N, SCORES
    )
    out = hopper.warpgroup_mma_wait(0, deps=(out,))
    hopper.mbarrier.arrive(value_empty.index(before), count=1)
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    return probability, out, most, total


@gluon_kernel()
def attend(  # type: ignore[no-untyped-def]
    index: tl.constexpr, memory, queries, rings, barriers, tile, keys, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute 64 rows of a tile; `index` is 0 or 1."""
    query_ptr, query_stride, out_ptr, part_ptr, lse_ptr, ended_ptr = memory
    kv_head, first, stop, position = tile
    last, blocks, masked, split, place, used = keys
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # 16 bytes per thread, so that a warp reads and writes whole rows.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    LIVE: gl.constexpr = HEADS // KV_HEADS
    query = queries.index(index)
    row = index * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    dim = gl.arange(0, D, gl.SliceLayout(0, LINES))
    token = (first + row // GROUP).to(gl.int64)
    head = kv_head * LIVE + row % GROUP
    live = (token < stop) & (row % GROUP < LIVE)
    source = query_ptr + (token * query_stride + head * D)[:, None] + dim[None, :]
    query.store(gl.load(source, mask=live[:, None], other=0.0))
    hopper.fence_async_shared()
    query_position = position + (index * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) // GROUP
    key_ring, value_ring = rings
    key_full, key_empty, value_full, _value_empty, _uncleared = barriers
    hopper.mbarrier.wait(key_full.index(0), 0)
    none = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    score = hopper.warpgroup_mma(query, key_ring.index(0).permute((1, 0)), none, use_acc=False)
    hopper.mbarrier.arrive(key_empty.index(0), count=1)
    most = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    probability, most, total, _shrink = _online_softmax(
        score, most, total, query_position, last, scale_log2, True, BLOCK_N, SCORES
    )
    state = probability, gl.zeros([64, D], gl.float32, OUTPUT), most, total
    for step in range(1, masked):
        state = _step(
            state, step, last, query, rings, barriers, query_position, scale_log2,
            True, BLOCK_N, STAGES, SCORES, OUTPUT,
        )  # fmt: skip
    for step in range(masked, blocks):
        state = _step(
            state, step, last, query, rings, barriers, query_position, scale_log2,
            False, BLOCK_N, STAGES, SCORES, OUTPUT,
        )  # fmt: skip
    probability, out, most, total = state
    end = blocks - 1
    left = gl.convert_layout(probability.to(query.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    hopper.mbarrier.wait(value_full.index(end % STAGES), (end // STAGES) & 1)
    out = hopper.warpgroup_mma(left, value_ring.index(end % STAGES), out)
    # A row of a part may have seen no key.
    divisor = gl.where(total > 0.0, total, 1.0)
    out = out / gl.convert_layout(divisor, gl.SliceLayout(1, OUTPUT))[:, None]
    line = token * HEADS + head
    whole = out_ptr + (line * D)[:, None] + dim[None, :]
    if used == 1:
        gl.store(whole, gl.convert_layout(out.to(query.dtype), LINES), mask=live[:, None])
    else:
        lse = gl.convert_layout(most * scale_log2 + gl.log2(total), gl.SliceLayout(1, LINES))
        lse_line = lse_ptr + place * 128 + row
        part = part_ptr + ((place * 128 + row) * D)[:, None] + dim[None, :]
        gl.store(lse_line + split * 128, lse, mask=live)
        gl.store(part + split * (128 * D), gl.convert_layout(out, LINES), mask=live[:, None])
        thread_barrier()  # all threads have stored before one of them counts this group
        ended_ptr += place * 2 + index
        ended = gl.atomic_add(ended_ptr, 1, sem="acq_rel")
        if ended == used - 1:
            gl.store(ended_ptr, 0)
            _add_parts(whole, part, lse_line, live, used, query.dtype, D, LINES)


@gluon_kernel()
def _add_parts(  # type: ignore[no-untyped-def]
    whole, part, lse_line, live, used, dtype: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr
):
    """Add up the parts of 64 rows. Other multiprocessors wrote them, so no cache of this one is read."""
    most = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LINES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LINES))
    out = gl.zeros([64, D], gl.float32, LINES)
    for each in range(used):
        lse = gl.load(lse_line + each * 128, mask=live, other=float("-inf"), cache_modifier=".cg")
        value = gl.load(part + each * (128 * D), mask=live[:, None], other=0.0, cache_modifier=".cg")
        new_most = gl.maximum(most, lse)
        shift = gl.where(new_most == float("-inf"), 0.0, new_most)
        weight, shrink = gl.exp2(lse - shift), gl.exp2(most - shift)
        total = total * shrink + weight
        out = out * shrink[:, None] + value * weight[:, None]
        most = new_most
    out = out / gl.where(total > 0.0, total, 1.0)[:, None]
    gl.store(whole, out.to(dtype), mask=live[:, None])
