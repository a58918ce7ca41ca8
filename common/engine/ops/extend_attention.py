"""Extend attention: any number of new tokens per request over pages that already hold their keys and values.

Reads only slots below a request's length: the contents of other pages, of the tail of the last page and of unused
page table entries never affect a result, not even as 0 * NaN. On Hopper GPUs `hopper_attention` serves where it can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.ended_programs import MAX_TILES, ended_programs
from common.engine.ops.extend_kernel import extend_kernel
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_extend, hopper_serves
from common.engine.ops.paged_attention import check_extend
from common.engine.ops.paged_gather import attend, first_visible, gather
from common.engine.ops.prompt_pieces import FINER, MAX_PARTS, MIN_PART, check_work, most_parts, most_pieces
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import cut_attention, room_of
from common.engine.ops.triton_kernel import LOG2_E, chained, multiprocessors, next_power_of_2

# Rows of a tile (query tokens times query heads of a KV head), keys per step, warps, and the tiles per processor from
# which the shape pays off; measured on an H200.
SHAPES = ((128, 128, 8, 6.0), (128, 64, 4, 2.0), (64, 64, 4, 0.2), (16, 64, 4, 0.0))
MEASURED_HEAD_BYTES = 256  # one head of one token: bf16, D 128
WIDE_SHAPE = (64, 32, 4)
PROGRAMS_PER_PROCESSOR = 2  # for which a processor has room


def extend_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of each request's new tokens, its last positions, over all of its seq_lens[b].

    Args:
        query: [T, heads, D], requests one after another; rows past the last request are padding.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], already holding the new tokens.
        page_table: [B, max_pages] int32.
        query_start: [B + 1] int32, prefix sums of new tokens.
        seq_lens: [B] int32, including new tokens. 0: the request's rows are computed elsewhere and zero here.
        window: number of keys that a query sees, including its own; None: all before it.
        scale: of scores.
        key_scale, value_scale: what stored keys and values are multiplied by.
        plan: `plan_prompts` of the batch, which `hopper_extend` reads.

    Returns [T, heads, D]; padding rows are zero.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or length == 0:
            continue
        offset = length - (last - first)
        begin = first_visible(offset, window)
        key = gather(key_plane, page_table[row], begin, length, query.dtype, key_scale)
        value = gather(value_plane, page_table[row], begin, length, query.dtype, value_scale)
        out[first:last] = attend(query[first:last], key, value, offset - begin, window, scale)
    return out


def choose_shape(all_rows: int, head_bytes: int, processors: int) -> tuple[int, int, int]:
    """Return (rows, keys, warps) of the largest tile that fills the GPU and fits shared memory."""
    if head_bytes > MEASURED_HEAD_BYTES:
        return WIDE_SHAPE
    fitting = (shape for shape in SHAPES if all_rows >= shape[0] * shape[3] * processors)
    return next(fitting)[:3]


class TileDivision(NamedTuple):
    """The division of one call among programs."""

    rows: int  # of a tile: query tokens times query heads of a KV head
    keys: int  # per step
    warps: int
    stages: int


def divide(
    count: int,
    heads: tuple[int, int, int],
    itemsize: int,
    device: torch.device,
    shape: tuple[int, int, int] | None = None,
    num_stages: int | None = None,
) -> TileDivision:
    """Choose the division of `count` query tokens.

    Args:
        heads: query heads, KV heads, head_dim.
        itemsize: of queries, in bytes.
        shape: rows and keys of a tile, and warps, see `choose_shape`.
    """
    queries, kv_heads, head_dim = heads
    group, processors = next_power_of_2(queries // kv_heads), multiprocessors(device)
    rows, keys, warps = shape or choose_shape(count * group * kv_heads, head_dim * itemsize, processors)
    stages = num_stages or (3 if keys == 64 else 2)
    sizes = stages, head_dim, itemsize
    rows, keys = cut_attention(max(rows, group), keys, *sizes, room_of(device), max(group, 16))
    return TileDivision(rows, keys, warps, stages)


def kernel_counts(
    min_tokens: int, max_tokens: int, heads: tuple[int, int, int], itemsize: int, device: torch.device
) -> list[int]:
    """Return token counts from `min_tokens` to `max_tokens`, one per kernel that `extend_triton` can launch."""
    found: dict[TileDivision, int] = {}
    for count in range(min_tokens, max_tokens + 1):
        found.setdefault(divide(count, heads, itemsize, device), count)
    return sorted(found.values())


def extend_triton(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    shape: tuple[int, int, int] | None = None,
    num_stages: int | None = None,
    programs: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch without reading lengths: the grid covers every division of T rows among the requests.

    Args:
        shape: rows and keys of a tile, and warps, see `choose_shape`.
        programs: that run at the same time; None: as many as a GPU has room for.
        out: contiguous result [T, heads, D], in which rows of requests of length 0, and padding, are left as they are;
            None: a new one, in which they are zero.
    """
    count, heads, head_dim = query.shape
    _, page_size, kv_heads, _ = key_plane.shape
    batch = seq_lens.shape[0]
    check_extend(query, key_plane, value_plane, page_table, query_start, seq_lens)
    keeps = out is not None
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    assert (out.shape, out.dtype) == (query.shape, query.dtype), "the result must be like the queries"
    assert out.is_contiguous(), "the result must be contiguous"
    if count == 0:
        return out
    group, sizes = next_power_of_2(heads // kv_heads), (heads, kv_heads, head_dim)
    division = divide(count, sizes, query.element_size(), query.device, shape, num_stages)
    tokens = division.rows // group
    programs = programs or PROGRAMS_PER_PROCESSOR * multiprocessors(query.device)
    parts = most_parts(programs)
    assert parts <= MAX_TILES, f"{parts} parts, {MAX_TILES} counts"
    outputs = torch.empty((parts, division.rows, head_dim), dtype=torch.float32, device=query.device)
    lse = outputs.new_empty((parts, division.rows))
    pieces = most_pieces(count, batch, tokens, kv_heads, programs)
    check_work(pieces, page_table, page_size, division.keys)
    extend_kernel[(pieces,)](
        query,
        key_plane,
        value_plane,
        page_table,
        query_start,
        seq_lens,
        out,
        outputs,
        lse,
        ended_programs(query.device),
        batch,
        count,
        query.stride(0),
        page_table.stride(0),
        window or 0,
        programs,
        scale * key_scale * LOG2_E,
        value_scale,
        EIGHT_BITS=key_plane.dtype is FP8,
        WINDOW=window is not None,
        PAGE_SIZE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        GROUP=group,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        TOKENS=tokens,
        BLOCK_N=division.keys,
        BLOCK_B=max(next_power_of_2(batch + 1), 128),
        MIN_PART=MIN_PART,
        MAX_PARTS=MAX_PARTS,
        FINER=FINER,
        KEEPS=keeps,
        **chained(query.device),
        num_warps=division.warps,
        num_stages=division.stages,
    )
    return out


def extend_cuda(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    given = query, key_plane, value_plane, page_table, query_start, seq_lens
    if hopper_serves(query, key_plane, window, (key_scale, value_scale)):
        return hopper_extend(*given, scale, plan)
    return extend_triton(*given, window, scale, key_scale, value_scale)


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


extend_attention = register_op("extend_attention", extend_reference, mutates=(), fake=_fake, cuda=extend_cuda)
