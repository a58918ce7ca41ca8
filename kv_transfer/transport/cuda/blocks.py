"""Copies parts of pages and state slots on a GPU and sums them up: for request states, and ranks with other heads.

The checksum is that of `pages`, over the words of all blocks in order. Only the first call for a list of parts waits
for the device, to which it sends their table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import msgspec
import torch
from torch import Tensor

from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.shard import RANKS
from kv_transfer.pair_plan import PairPlan, RowsPair, StridedRows, pair_plan
from kv_transfer.transport.cuda.pages import MIX, POSITION, WORDS, block_words, jit, mixed_words, word_terms

try:
    import triton.language as tl
except ImportError:  # a CPU-only installation: torch moves the parts
    tl = None

_WIDEST: Final = 16  # bytes of the widest access


@dataclass(frozen=True, slots=True, eq=False)
class PartGroup:
    """Parts of equal shape: one launch. `word_bytes` divides the starts of all their items and rows."""

    parts: tuple[RowsPair, ...]
    firsts: tuple[int, ...]  # number of the first word of each part, for the checksum
    word_bytes: int
    sum_bytes: int  # bytes of a word of the checksum
    table: Tensor  # [parts, 7] int64: offset, item and stride of both sides in units, and the first word's number
    unit: int  # words

    @property
    def rows(self) -> int:
        return self.parts[0].src.rows

    @property
    def row_words(self) -> int:
        return self.parts[0].src.length // self.word_bytes


def move_parts(
    src: Tensor,
    dst: Tensor | None,
    parts: Sequence[RowsPair],
    items: Tensor,
    sums: Tensor | None,
    max_blocks: int,
    first: int = 0,
) -> None:
    """Launch on the current stream: copy items[0] of `src` to items[1] of `dst` and add checksums to `sums`.

    Args:
        src, dst: the whole pools, flat uint8; nothing is copied if `dst` is None.
        items: [2, n] int32 page or slot ids, or [1, n] without `dst`.
        sums: [n] int64; no checksums are computed if None.
        max_blocks: upper bound of thread blocks: the share of the GPU that the copy may take from other kernels.
        first: number of the first word: 0, or `words` of the preceding blocks.
    """
    for group in part_groups(tuple(parts), src.device):
        if src.is_cuda and group.word_bytes == group.sum_bytes:
            move_group_kernel(src, dst, group, items, sums, max_blocks, first)
        else:
            move_group_reference(src, dst, group, items, sums, max_blocks, first)


def compile_moves(memory: Tensor, layout: PoolLayout) -> None:
    """Compile the kernels that send parts of this pool, flat uint8, to peers of any number of ranks; moves nothing."""
    nothing = torch.zeros(2, 0, dtype=torch.int32, device=memory.device)
    sums = torch.zeros(0, dtype=torch.int64, device=memory.device)
    for other in _possible_peers(layout):
        for parts in _apart(pair_plan(layout, other)):
            for dst, each in ((memory, None), (memory, sums), (None, sums)):
                move_parts(memory, dst, parts, nothing, each, 1)


def compile_checksums(memory: Tensor, layout: PoolLayout) -> None:
    """Compile the kernels that sum up parts of this pool, flat uint8, which any peer sends or receives."""
    nothing = torch.zeros(1, 0, dtype=torch.int32, device=memory.device)
    sums = torch.zeros(0, dtype=torch.int64, device=memory.device)
    for other in _possible_peers(layout):
        sent, received = _apart(pair_plan(layout, other)), _apart(pair_plan(other, layout))
        own = [[part.src for part in parts] for parts in sent] + [
            [part.dst for part in parts] for parts in received
        ]
        for blocks in own:
            move_parts(memory, None, [RowsPair(block, block) for block in blocks], nothing, sums, 1)


def _possible_peers(layout: PoolLayout) -> Iterator[PoolLayout]:
    """Yield layouts of all ranks that a peer may have; the sizes of its pool do not change the kernels."""
    for size in RANKS:
        for rank in range(size):
            try:
                other = msgspec.structs.replace(layout, tp_rank=rank, tp_size=size)
            except ValueError:
                continue  # no node has this model on that many ranks
            yield other


def _apart(plan: PairPlan) -> Sequence[Sequence[RowsPair]]:
    """Return the lists that are sent in parts: the pages, unless they are sent as a whole, and the state."""
    pages = () if plan.whole else tuple(part for plane in plan.planes for part in plane)
    return [each for each in (pages, plan.state) if each]


def words(blocks: Sequence[StridedRows]) -> int:
    """Return the words of one item over these blocks, which are equal on both sides of a pair."""
    return sum(block.rows * block.length // _sum_bytes(block) for block in blocks)


# One list of parts for each layer and rank of a peer, if they differ: a table that is dropped is copied again, and
# that waits for the device. A table takes some KiB.
@functools.lru_cache(maxsize=8192)
def part_groups(parts: tuple[RowsPair, ...], device: torch.device) -> tuple[PartGroup, ...]:
    """Group parts by shape and alignment. The table of a group is made once, by a copy that blocks."""
    firsts = [0, *accumulate(words([part.src]) for part in parts)]
    alike: dict[tuple[int, int, int], list[int]] = {}
    for number, part in enumerate(parts):
        word = math.gcd(_word(part.src), _word(part.dst))
        alike.setdefault((part.src.rows, part.src.length, word), []).append(number)
    return tuple(
        _group([parts[n] for n in numbers], [firsts[n] for n in numbers], word, device)
        for (_, _, word), numbers in alike.items()
    )


def _group(parts: Sequence[RowsPair], firsts: Sequence[int], word: int, device: torch.device) -> PartGroup:
    starts = [
        [value // word for side in part for value in (side.offset, side.item, side.stride)] for part in parts
    ]
    unit = math.gcd(_WIDEST // word, *(value for row in starts for value in row))
    rows = [[*(value // unit for value in row), at] for row, at in zip(starts, firsts, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return PartGroup(tuple(parts), tuple(firsts), word, _sum_bytes(parts[0].src), table, unit)


def move_group_reference(
    src: Tensor,
    dst: Tensor | None,
    group: PartGroup,
    items: Tensor,
    sums: Tensor | None,
    max_blocks: int,
    first: int,
) -> None:
    """Move one group in torch: on the CPU, and rows that are not aligned to the checksum's words. See `move_parts`."""
    if not items.size(1):
        return
    for part, at in zip(group.parts, group.firsts, strict=True):
        rows = _rows(src, part.src, group.word_bytes).index_select(0, items[0].long())
        if dst is not None:
            _rows(dst, part.dst, group.word_bytes).index_copy_(0, items[1].long(), rows)
        if sums is not None:
            data = rows.reshape(items.size(1), -1).view(WORDS[group.sum_bytes])
            inside = torch.arange(first + at, first + at + data.size(1), device=src.device)
            sums += mixed_words(data, inside).sum(1)


def _rows(memory: Tensor, block: StridedRows, word: int) -> Tensor:
    """Return a [items, rows, words] view of one block in every item that fits into `memory`."""
    end = block.offset + (block.rows - 1) * block.stride + block.length
    count = 1 + (memory.numel() - end) // block.item
    shape = (count, block.rows, block.length // word)
    stride = (block.item // word, block.stride // word, 1)
    return _as_words(memory, word).as_strided(shape, stride, block.offset // word)


def _as_words(memory: Tensor, word: int) -> Tensor:
    return memory[: memory.numel() // word * word].view(WORDS[word])


def _word(block: StridedRows) -> int:
    return math.gcd(8, *block[:3], block.stride)


def _sum_bytes(block: StridedRows) -> int:
    return math.gcd(8, block.rows * block.length)


def move_group_kernel(
    src: Tensor,
    dst: Tensor | None,
    group: PartGroup,
    items: Tensor,
    sums: Tensor | None,
    max_blocks: int,
    first: int,
) -> None:
    """Move one group by the kernel. See `move_parts`."""
    count = group.rows * group.row_words
    block = block_words(count)
    num_items, num_parts = items.size(1), len(group.parts)
    source = _as_words(src, group.word_bytes)
    _parts_kernel[(min(num_items * num_parts * -(-count // block), max_blocks),)](
        source,
        source if dst is None else _as_words(dst, group.word_bytes),
        items,
        group.table,
        items if sums is None else sums,
        first,
        num_parts,
        num_items,
        ROWS=group.rows,
        ROW_WORDS=group.row_words,
        UNIT=group.unit,
        BLOCK=block,
        COPY=dst is not None,
        SUM=sums is not None,
        ROW=POSITION,
        MIXER=MIX,
        num_warps=8 if block >= 1024 else 4,
    )


@jit("first", "num_parts", "num_items")
def _parts_kernel(  # type: ignore[no-untyped-def]
    src,
    dst,
    items,
    table,
    sums,
    first,
    num_parts,
    num_items,
    ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
    SUM: tl.constexpr,
    ROW: tl.constexpr,
    MIXER: tl.constexpr,
):
    """Blocks stride over (part, item, chunk of the item); neighbouring blocks take neighbouring chunks."""
    count: tl.constexpr = ROWS * ROW_WORDS
    chunks: tl.constexpr = (count + BLOCK - 1) // BLOCK
    for each in range(tl.program_id(0), num_parts * num_items * chunks, tl.num_programs(0)):
        inside = (each % chunks) * BLOCK + tl.arange(0, BLOCK)
        item = (each // chunks) % num_items
        part = table + (each // chunks // num_items) * 7
        live = inside < count
        row = (inside // ROW_WORDS).to(tl.int64)
        column = inside % ROW_WORDS
        start = tl.load(part) + tl.load(items + item).to(tl.int64) * tl.load(part + 1)
        if ROWS == 1:
            data = tl.load(src + start * UNIT + inside, mask=live, other=0)
        else:
            data = tl.load(src + (start + row * tl.load(part + 2)) * UNIT + column, mask=live, other=0)
        if COPY:
            start = tl.load(part + 3) + tl.load(items + num_items + item).to(tl.int64) * tl.load(part + 4)
            if ROWS == 1:
                tl.store(dst + start * UNIT + inside, data, mask=live)
            else:
                tl.store(dst + (start + row * tl.load(part + 5)) * UNIT + column, data, mask=live)
        if SUM:
            mixed = word_terms(data, tl.load(part + 6) + first + inside, ROW, MIXER)
            tl.atomic_add(sums + item, tl.sum(tl.where(live, mixed, 0)), sem="relaxed")
