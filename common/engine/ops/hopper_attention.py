"""Extend attention on Hopper GPUs: warp groups of a program load keys, multiply and exponentiate at the same time.

One warp copies keys and values from their pages into shared memory; a bulk copy takes 64 columns of one page. Two warp
groups compute 64 rows each. While the matrix units multiply for one group (the keys of step n, and the probabilities
and values of step n - 1), the other group computes exponentials. This is FlashAttention-3 (arXiv 2407.08608) without
its barriers that make the groups take turns. The kernel is written in Gluon, the layer of Triton in which a program
says which warps do what.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.ended_programs import MAX_TILES, ended_programs
from common.engine.ops.hopper_warps import attend, copy
from common.engine.ops.paged_attention import check_extend
from common.engine.ops.prompt_pieces import FIELDS, MIN_PART, check_work, most_parts, most_pieces, plan_pieces
from common.engine.ops.triton_kernel import (
    LOG2_E,
    cdiv,
    chained,
    gl,
    gluon_kernel,
    hopper,
    is_hopper,
    multiprocessors,
    next_power_of_2,
    swizzled_tiles,
    tl,
)

ROWS = 128  # query tokens times query heads of a KV head, of one program
WIDTH = 64  # columns of a bulk copy: 128 bytes, the most that are stored without bank conflicts
STAGES = 2  # steps of keys, and of values, in shared memory
HEAD_DIMS = (64, 128, 256)
MIN_PAGE = 8  # tokens
# Registers per thread: of the groups that multiply, of the warp that copies, and at launch, before these take theirs.
REGISTERS, COPY_REGISTERS, LAUNCHED_REGISTERS = 240, 24, 168


def block_keys(head_dim: int) -> int:
    """Return the keys of a step; a warp group has their scores and its output in registers."""
    return 64 if head_dim > 128 else 128


@gluon_kernel()
def _await_previous(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do as `triton_kernel.await_previous`."""
    if CHAINED:
        launch: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
        gl.inline_asm_elementwise(launch, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        wait: gl.constexpr = "griddepcontrol.wait; // $0"
        gl.inline_asm_elementwise(wait, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_kernel("slots", "table_stride", "pieces")
def _hopper_extend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, HEADS, D]
    key_plane,  # [slots, KV_HEADS * D], descriptors of pages
    value_plane,
    table_ptr,  # [B, max_pages]
    plan_ptr,  # [pieces, FIELDS], see `plan_pieces`
    out_ptr,  # [T, HEADS, D]
    part_ptr,  # [most_parts, ROWS, D] float32
    lse_ptr,  # [most_parts, ROWS] float32
    ended_ptr,  # int32, zero before and after: groups that have ended, by the place of a tile's first part, and half
    pieces,
    slots,  # of the planes, which are converted pages or a pool
    query_stride,
    table_stride,
    scale_log2,  # scale * log2(e)
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head, padded to a power of two
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_PART: tl.constexpr,
    FIELDS: tl.constexpr,
    REGISTERS: tl.constexpr,
    COPY_REGISTERS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute pieces of the output: one each, or several if there are more pieces than programs.

    The tokens that follow the last request are padding, whose rows become zero.
    """
    _await_previous(CHAINED)
    TOKENS: gl.constexpr = 128 // GROUP
    LIVE: gl.constexpr = HEADS // KV_HEADS
    dtype: gl.constexpr = key_plane.dtype
    COPIES: gl.constexpr = STAGES * (BLOCK_N // PAGE) * (D // 64)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    key_pages = gl.allocate_shared_memory(dtype, [COPIES, PAGE, 64], LAYOUT)
    value_pages = gl.allocate_shared_memory(dtype, [COPIES, PAGE, 64], LAYOUT)
    # A block is stored as its columns 0 to 63, then the next 64, and so on, so it is a sequence of pages' columns.
    key_ring = key_pages._reinterpret(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    value_ring = value_pages._reinterpret(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    lines = value_pages._reinterpret(dtype, [COPIES * PAGE // 8, 8, 64], LAYOUT)
    queries = gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT)
    words: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], words)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], words)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], words)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], words)
    # Completes when the first block of values has arrived. `value_full` follows once its tail has been cleared, too.
    uncleared = gl.allocate_shared_memory(gl.int64, [1, 1], words)

    piece, turn = gl.program_id(0), 1
    parts = gl.load(plan_ptr + piece * FIELDS)
    while parts > 0:
        entry = plan_ptr + piece * FIELDS
        request, stop, length, first = (
            gl.load(entry + 1),
            gl.load(entry + 2),
            gl.load(entry + 3),
            gl.load(entry + 4),
        )
        kv_head, split, place = gl.load(entry + 5), gl.load(entry + 6), gl.load(entry + 7)
        if length == 0:
            if split == 0:
                zeros: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
                row = gl.arange(0, 128, gl.SliceLayout(1, zeros))
                dim = gl.arange(0, D, gl.SliceLayout(0, zeros))
                token = (first + row // GROUP).to(gl.int64)
                line = token * HEADS + kv_head * LIVE + row % GROUP
                live = ((token < stop) & (row % GROUP < LIVE))[:, None]
                nothing = gl.zeros([128, D], out_ptr.dtype.element_ty, zeros)
                gl.store(out_ptr + (line * D)[:, None] + dim[None, :], nothing, mask=live)
        else:
            position = length - stop + first  # of the tile's first query
            end = gl.minimum(position + TOKENS, length)
            blocks = gl.cdiv(end, BLOCK_N)
            share = gl.maximum(gl.cdiv(blocks, parts), MIN_PART // BLOCK_N)
            used = gl.cdiv(blocks, share)  # parts that have keys: the first ones
            begin = split * share
            if begin < blocks:
                stop_block = gl.minimum(begin + share, blocks)
                # Below it every query of the tile sees every key.
                clear = gl.maximum((position + 1) // BLOCK_N, begin)
                masked = gl.maximum(stop_block - clear, 1)
                for stage in gl.static_range(STAGES):
                    hopper.mbarrier.init(key_full.index(stage), count=1)
                    hopper.mbarrier.init(value_full.index(stage), count=1)
                    hopper.mbarrier.init(key_empty.index(stage), count=2)
                    hopper.mbarrier.init(value_empty.index(stage), count=2)
                hopper.mbarrier.init(uncleared.index(0), count=1)
                hopper.fence_async_shared()
                barriers = key_full, key_empty, value_full, value_empty, uncleared
                memory = query_ptr, query_stride, out_ptr, part_ptr, lse_ptr, ended_ptr
                rings = key_ring, value_ring
                here = kv_head, first, stop, position
                keys = stop_block - 1, stop_block - begin, masked, split, place, used
                table = table_ptr + request.to(gl.int64) * table_stride
                gl.warp_specialize(
                    [
                        (
                            attend,
                            (
                                0, memory, queries, rings, barriers, here, keys, scale_log2,
                                HEADS, KV_HEADS, D, GROUP, BLOCK_N, STAGES,
                            ),
                        ),
                        (
                            attend,
                            (
                                1, memory, queries, rings, barriers, here, keys, scale_log2,
                                HEADS, KV_HEADS, D, GROUP, BLOCK_N, STAGES,
                            ),
                        ),
                        (
                            copy,
                            (
                                (key_plane, value_plane), (key_pages, value_pages), lines, barriers, table,
                                stop_block - 1, stop_block - begin, end, kv_head * D, slots,
                                PAGE, D, BLOCK_N, STAGES,
                            ),
                        ),
                    ],
                    [4, 1],
                    [REGISTERS, COPY_REGISTERS],
                )  # fmt: skip
                # The next piece initialises them again.
                for stage in gl.static_range(STAGES):
                    hopper.mbarrier.invalidate(key_full.index(stage))
                    hopper.mbarrier.invalidate(value_full.index(stage))
                    hopper.mbarrier.invalidate(key_empty.index(stage))
                    hopper.mbarrier.invalidate(value_empty.index(stage))
                hopper.mbarrier.invalidate(uncleared.index(0))
        # The next turn is in reverse order: a program that computed one of the first pieces computes one of the last.
        piece = 2 * turn * gl.num_programs(0) - 1 - piece
        turn += 1
        parts = gl.load(plan_ptr + piece * FIELDS, mask=piece < pieces, other=0)


def hopper_serves(query: Tensor, plane: Tensor, window: int | None, scales: tuple[float, float]) -> bool:
    """Return whether `hopper_extend` computes extend attention of these queries over planes like this one."""
    return (
        plane.dtype == query.dtype and scales == (1.0, 1.0) and hopper_reads(query, plane.shape[1:], window)
    )


def hopper_reads(query: Tensor, page: torch.Size, window: int | None) -> bool:
    """Return whether `hopper_extend` serves pages [page_size, kv_heads, D] if they have the dtype of the queries."""
    page_size, kv_heads, head_dim = page
    return (
        is_hopper(query.device)
        and window is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim in HEAD_DIMS
        and query.shape[1] <= ROWS * kv_heads
        and MIN_PAGE <= page_size <= block_keys(head_dim)
        and page_size == next_power_of_2(page_size)
        and query.stride(0) % 8 == 0
    )


def plan_prompts(
    query: Tensor, key_plane: Tensor, query_start: Tensor, seq_lens: Tensor, programs: int | None = None
) -> Tensor:
    """Return the plan of `hopper_extend` for prompts: it is the same for all layers."""
    count, heads, head_dim = query.shape
    kv_heads = key_plane.shape[2]
    tile = ROWS // next_power_of_2(heads // kv_heads)
    rest = kv_heads, block_keys(head_dim), programs or multiprocessors(query.device)
    return plan_pieces(query_start, seq_lens, count, tile, *rest)


def hopper_extend(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """Compute `extend_attention` without a window, where `hopper_serves`.

    Args:
        scale: of scores, positive.
        plan: `plan_prompts` of these queries and lengths; None: it is made here.
        programs: that run at the same time; None: one per multiprocessor.
    """
    assert scale > 0.0, "the largest score is searched for before it is scaled"
    count, heads, head_dim = query.shape
    num_pages, page_size, kv_heads, _ = key_plane.shape
    check_extend(query, key_plane, value_plane, page_table, query_start, seq_lens)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if count == 0:
        return out
    slots, group = num_pages * page_size, next_power_of_2(heads // kv_heads)
    programs = programs or multiprocessors(query.device)
    if plan is None:
        plan = plan_prompts(query, key_plane, query_start, seq_lens, programs)
    pieces = most_pieces(count, len(seq_lens), ROWS // group, kv_heads, programs)
    assert plan.shape == (pieces, FIELDS), f"a plan of {len(plan)} pieces for {pieces}"
    check_work(pieces, page_table, page_size, block_keys(head_dim))
    parts = most_parts(programs)
    assert 2 * parts <= MAX_TILES, f"{2 * parts} groups of warps, {MAX_TILES} counts"
    outputs = torch.empty((parts, ROWS, head_dim), dtype=torch.float32, device=query.device)
    lse = outputs.new_empty((parts, ROWS))
    # One request has this many tiles. Several may have more, which the same programs compute one after another. With
    # more tiles than programs at a time, there are so many programs more for parts. Those without a piece end at once.
    whole = kv_heads * cdiv(count, ROWS // group)
    launched = programs if whole <= programs else whole + programs
    planes = [
        swizzled_tiles(plane.view(slots, kv_heads * head_dim), page_size, WIDTH)
        for plane in (key_plane, value_plane)
    ]
    _hopper_extend_kernel[(launched,)](
        query,
        *planes,
        page_table,
        plan,
        out,
        outputs,
        lse,
        ended_programs(query.device),
        pieces,
        slots,
        query.stride(0),
        page_table.stride(0),
        scale * LOG2_E,
        PAGE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        GROUP=group,
        BLOCK_N=block_keys(head_dim),
        STAGES=STAGES,
        MIN_PART=MIN_PART,
        FIELDS=FIELDS,
        REGISTERS=REGISTERS,
        COPY_REGISTERS=COPY_REGISTERS,
        **chained(query.device),
        num_warps=4,
        maxnreg=LAUNCHED_REGISTERS,
    )
    return out
