"""Copies pages between two pools on GPUs and computes their checksums, in one launch over all planes.

The checksum of a page is the sum, modulo 2^64, over its words in plane order, of

    fold(fold(word ^ (i * POSITION)) * MIX)   where   fold(x) = x ^ (x >> 32)   and i numbers the page's words

A changed word always changes its term, and words that swap positions change theirs, so torn, stale and misplaced
pages are detected. It is not a cryptographic hash and does not detect forged pages. A sum does not depend on order,
so blocks add to it as they finish, and the sums of pages that are sent plane by plane add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from common.kv_cache.pool_layout import PoolLayout

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation: other transports move the pages
    triton = None

POSITION: Final = 0x1E3779B97F4A7C15
MIX: Final = 0x2545F4914F6CDD1D
_UNIT: Final = 16  # bytes: unit of plane offsets, so that the compiler can use wide accesses
_MAX_BLOCK: Final = 2048  # words per block
WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Neighbouring planes with equal page sizes: one launch."""

    planes: range
    page_words: int  # words per page of one plane
    offsets: Tensor  # [planes] int64: start of each plane, in units of 16 bytes
    positions: Tensor  # [planes] int64: number of the plane's first word within the page


class PagedMemory:
    """A pool on one GPU as the kernel addresses it: words and the start of each plane."""

    def __init__(self, layout: PoolLayout, memory: Tensor, device: torch.device) -> None:
        """`memory` is flat uint8; `device` is the GPU whose kernels access it."""
        sizes = [plane.page_bytes for plane in layout.planes]
        self.word_bytes = math.gcd(8, *sizes)
        self.words = memory[: layout.total_bytes].view(WORDS[self.word_bytes])
        first = [0, *accumulate(size // self.word_bytes for size in sizes)]
        self.groups: list[PlaneGroup] = []
        start = 0
        for end in range(1, len(sizes) + 1):
            if end < len(sizes) and sizes[end] == sizes[start]:
                continue
            planes = range(start, end)
            offsets = [layout.planes[plane].offset // _UNIT for plane in planes]
            positions = [first[plane] for plane in planes]
            self.groups.append(
                PlaneGroup(
                    planes,
                    sizes[start] // self.word_bytes,
                    torch.tensor(offsets, dtype=torch.int64, device=device),
                    torch.tensor(positions, dtype=torch.int64, device=device),
                )
            )
            start = end


def page_list(*pages: Sequence[int], device: torch.device) -> Tensor:
    """Return [len(pages), n] int32 on `device`; the copy does not block."""
    # torch.tensor takes three times as long.
    index = torch.from_numpy(np.array(pages, dtype=np.int32))
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def move_pages(
    src: PagedMemory,
    dst: PagedMemory | None,
    pages: Tensor,
    sums: Tensor | None,
    planes: range,
    max_blocks: int,
) -> None:
    """Launch on the current stream: copy pages[0] of `src` to pages[1] of `dst` and add checksums to `sums`.

    Args:
        dst: pool whose planes have the same shapes; nothing is copied if None.
        pages: [2, n] int32, or [1, n] without `dst`.
        sums: [n] int64; no checksums are computed if None.
        planes: the planes to process.
        max_blocks: upper bound of thread blocks: the share of the GPU that the copy may take from other kernels.
    """
    for number, group in enumerate(src.groups):
        first = max(planes.start, group.planes.start)
        count = min(planes.stop, group.planes.stop) - first
        if count <= 0 or not pages.size(1):
            continue
        into = src if dst is None else dst
        launch = move_pages_kernel if src.words.is_cuda else move_pages_reference
        launch(
            src.words,
            into.words if dst is not None else None,
            pages,
            group,
            into.groups[number].offsets,
            sums,
            first - group.planes.start,
            count,
            src.word_bytes,
            max_blocks,
        )


def move_pages_reference(
    src: Tensor,
    dst: Tensor | None,
    pages: Tensor,
    group: PlaneGroup,
    dst_offsets: Tensor,
    sums: Tensor | None,
    first: int,
    count: int,
    word_bytes: int,
    max_blocks: int,
) -> None:
    """Move pages of one group of planes in torch, on the CPU. See `move_pages`."""
    words, unit = group.page_words, _UNIT // word_bytes
    inside = torch.arange(words)
    for plane in range(first, first + count):
        rows = group.offsets[plane] * unit + pages[0].long()[:, None] * words + inside
        data = src[rows]  # [n, words]
        if dst is not None:
            dst[dst_offsets[plane] * unit + pages[1].long()[:, None] * words + inside] = data
        if sums is not None:
            sums += mixed_words(data, group.positions[plane] + inside).sum(1)


def mixed_words(data: Tensor, numbers: Tensor) -> Tensor:
    """Return the terms of the checksum of words [n, w], numbered within their page by `numbers` [w]."""
    return _fold(_fold(data.long() ^ (numbers * POSITION)) * MIX)


def _fold(x: Tensor) -> Tensor:
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def move_pages_kernel(
    src: Tensor,
    dst: Tensor | None,
    pages: Tensor,
    group: PlaneGroup,
    dst_offsets: Tensor,
    sums: Tensor | None,
    first: int,
    count: int,
    word_bytes: int,
    max_blocks: int,
) -> None:
    """Move pages of one group of planes by the kernel. See `move_pages`."""
    words = group.page_words
    block = block_words(words)
    num_pages = pages.size(1)
    items = num_pages * count * -(-words // block)
    _pages_kernel[(min(items, max_blocks),)](
        src,
        src if dst is None else dst,
        pages,
        group.offsets,
        dst_offsets,
        group.positions,
        pages if sums is None else sums,
        first,
        count,
        num_pages,
        WORDS=words,
        UNIT=_UNIT // word_bytes,
        BLOCK=block,
        EVEN=words % block == 0,
        COPY=dst is not None,
        SUM=sums is not None,
        ROW=POSITION,
        MIXER=MIX,
        num_warps=8 if block >= 1024 else 4,
    )


def block_words(count: int) -> int:
    """Return the words that a thread block takes of `count`: a power of two that divides it, if that is enough."""
    block = min(_MAX_BLOCK, count & -count)
    return block if block >= 128 else min(_MAX_BLOCK, 1 << (count - 1).bit_length())


def jit(*varying: str) -> Callable[[Any], Any]:
    """Compile a kernel once for all values of the arguments `varying`; does nothing without Triton."""
    return lambda function: triton.jit(function, do_not_specialize=list(varying)) if triton else function


@jit()
def word_terms(data, number, ROW: tl.constexpr, MIXER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the terms of the checksum of words, as `mixed_words` does; as int64."""
    mixed = data.to(tl.int64).to(tl.uint64) ^ (number.to(tl.uint64) * ROW)
    mixed = (mixed ^ (mixed >> 32)) * MIXER
    return (mixed ^ (mixed >> 32)).to(tl.int64)


@jit("first_plane", "num_planes", "num_pages")
def _pages_kernel(  # type: ignore[no-untyped-def]
    src,
    dst,
    pages,
    src_planes,
    dst_planes,
    positions,
    sums,
    first_plane,
    num_planes,
    num_pages,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    COPY: tl.constexpr,
    SUM: tl.constexpr,
    ROW: tl.constexpr,
    MIXER: tl.constexpr,
):
    """Blocks stride over (plane, page, chunk of the page); neighbouring blocks take neighbouring chunks."""
    chunks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    inside = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), num_planes * num_pages * chunks, tl.num_programs(0)):
        at = (item % chunks) * BLOCK
        page = (item // chunks) % num_pages
        plane = first_plane + item // chunks // num_pages
        source = tl.load(src_planes + plane) * UNIT + tl.load(pages + page).to(tl.int64) * WORDS + at
        if EVEN:
            data = tl.load(src + source + inside)
        else:
            live = at + inside < WORDS
            data = tl.load(src + source + inside, mask=live, other=0)
        if COPY:
            page_out = tl.load(pages + num_pages + page).to(tl.int64)
            target = tl.load(dst_planes + plane) * UNIT + page_out * WORDS + at
            if EVEN:
                tl.store(dst + target + inside, data)
            else:
                tl.store(dst + target + inside, data, mask=live)
        if SUM:
            mixed = word_terms(data, tl.load(positions + plane) + at + inside, ROW, MIXER)
            if not EVEN:
                mixed = tl.where(live, mixed, 0)
            tl.atomic_add(sums + page, tl.sum(mixed), sem="relaxed")
