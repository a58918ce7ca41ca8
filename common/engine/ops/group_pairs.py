"""Pairs of a token and an expert, grouped by expert and divided into tiles: a counting sort on the device.

Two launches that each read the pairs once: the pairs of each expert are counted by block, then every block writes its
pairs where the counts say. The work of both follows from the number of pairs, whatever the experts are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

# Pairs of a program: fewer are faster until every program reads the counts of many blocks.
SMALL_BLOCK, BLOCK, SMALL = 256, 512, 20_000
PART = 128  # pairs that are compared with each other
COUNTS = 16  # blocks whose counts are read at once
TILES = 32  # tiles of a program
FIELDS = 3  # numbers of a tile


class PairGroups(NamedTuple):
    """Pairs in the order of their experts, and tiles of adjacent pairs of one expert.

    A place is an index of `pairs`.
    """

    pairs: Tensor  # [P] int32, ascending within an expert; those without an expert are left out
    tiles: Tensor  # [N, FIELDS] int32: (expert, first place, number of pairs); zeros past the last tile


def max_tiles(pairs: int, count: int, rows: int) -> int:
    """Return N, the most tiles that any choice of experts needs: each expert may have one that is not full."""
    return cdiv(pairs, rows) + min(count, pairs)


def group_pairs_reference(experts: Tensor, count: int, rows: int, extra: int = 0) -> PairGroups:
    """Group the pairs of `experts` [P] int32, of `count` experts; negative: the pair is left out.

    All tiles of an expert have `rows` pairs except the last, which may have fewer, or up to `extra` more.
    """
    sizes = experts[experts >= 0].bincount(minlength=count)
    pairs = experts.argsort(stable=True)[len(experts) - int(sizes.sum()) :]
    listed, first = [], 0
    for expert, size in enumerate(sizes.tolist()):
        full = max(cdiv(size - extra, rows), 1) - 1 if size else 0
        listed += [(expert, first + index * rows, rows) for index in range(full)]
        if size:
            listed.append((expert, first + full * rows, size - full * rows))
        first += size
    tiles = experts.new_zeros((max_tiles(len(experts), count, rows), FIELDS))
    tiles[: len(listed)] = experts.new_tensor(listed).view(-1, FIELDS)
    return PairGroups(torch.cat([pairs, pairs.new_zeros(len(experts) - len(pairs))]).int(), tiles)


@kernel_with_varying("total")
def _count_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,  # [total]
    counts_ptr,  # [blocks, experts]
    total,
    experts,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,  # at least `experts`
    CHAINED: tl.constexpr,
):
    """Each program counts the pairs of every expert in one block."""
    await_previous(CHAINED)
    expert, place = tl.arange(0, BLOCK_E), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(experts_ptr + place, mask=place < total, other=-1)
    counts = tl.histogram(tl.maximum(found, 0), BLOCK_E, mask=found >= 0)
    tl.store(counts_ptr + tl.program_id(0) * experts + expert, counts, mask=expert < experts)


@kernel_with_varying("total", "blocks", "most")
def _place_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,  # [total]
    counts_ptr,  # [blocks, experts]
    pairs_ptr,  # [total]
    tiles_ptr,  # [most, FIELDS]
    total,
    blocks,
    most,
    experts,
    ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    COUNTS: tl.constexpr,
    TILES: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The first programs write the pairs of a block each, the others some tiles each."""
    await_previous(CHAINED)
    block = tl.program_id(0)
    expert, row = tl.arange(0, BLOCK_E), tl.arange(0, COUNTS)
    sizes = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, blocks, COUNTS):
        other = (first + row)[:, None]
        read = (other < blocks) & (expert < experts)[None, :]
        counts = tl.load(counts_ptr + other * experts + expert[None, :], mask=read, other=0)
        sizes += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(other < block, counts, 0), axis=0)
    ends = tl.cumsum(sizes, axis=0)
    if block < blocks:
        at = ends - sizes + before
        index = tl.arange(0, PART)
        for part in range(block * BLOCK, block * BLOCK + BLOCK, PART):
            place = part + index
            # Loaded twice, for rows and for columns of the comparison.
            found = tl.load(experts_ptr + place, mask=place < total, other=-1)
            same = found[:, None] == tl.load(experts_ptr + place, mask=place < total, other=-1)[None, :]
            rank = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
            known = tl.maximum(found, 0)
            tl.store(pairs_ptr + tl.gather(at, known, axis=0) + rank, place, mask=found >= 0)
            at += tl.histogram(known, BLOCK_E, mask=found >= 0)
    else:
        needed = tl.where(sizes > 0, tl.maximum((sizes - EXTRA + ROWS - 1) // ROWS, 1), 0)
        past = tl.cumsum(needed, axis=0)
        tile = (block - blocks) * TILES + tl.arange(0, TILES)
        passed = (past[None, :] <= tile[:, None]) & (expert < experts)[None, :]
        owner = tl.sum(passed.to(tl.int32), axis=1)
        known = tl.minimum(owner, experts - 1)
        left = tl.gather(past, known, axis=0) - tile  # tiles of this expert from this one on
        end = tl.gather(ends, known, axis=0)
        begin = end - tl.gather(sizes, known, axis=0) + (tl.gather(needed, known, axis=0) - left) * ROWS
        field = tiles_ptr + tile * FIELDS
        used = owner < experts
        tl.store(field, tl.where(used, owner, 0), mask=tile < most)
        tl.store(field + 1, tl.where(used, begin, 0), mask=tile < most)
        tl.store(field + 2, tl.where(used, tl.where(left > 1, ROWS, end - begin), 0), mask=tile < most)


def group_pairs_triton(experts: Tensor, count: int, rows: int, extra: int = 0) -> PairGroups:
    """Compute `group_pairs_reference` on a GPU; values that it does not define may be anything."""
    total = experts.shape[0]
    assert experts.dtype == torch.int32 and experts.is_contiguous(), "experts are int32 in a row"  # noqa: PT018
    block = SMALL_BLOCK if total <= SMALL else BLOCK
    blocks, most = cdiv(total, block), max_tiles(total, count, rows)
    counts = experts.new_empty((blocks, count))
    groups = PairGroups(torch.empty_like(experts), experts.new_empty((most, FIELDS)))
    if total == 0:
        return groups
    shared = {"BLOCK": block, "BLOCK_E": next_power_of_2(count), "num_warps": 4, **chained(experts.device)}
    _count_pairs_kernel[(blocks,)](experts, counts, total, count, **shared)
    _place_pairs_kernel[(blocks + cdiv(most, TILES),)](
        *(experts, counts, *groups, total, blocks, most, count),
        ROWS=rows,
        EXTRA=extra,
        PART=PART,
        COUNTS=COUNTS,
        TILES=TILES,
        FIELDS=FIELDS,
        **shared,
    )
    return groups
