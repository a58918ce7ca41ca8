"""The checksum of a page or state slot in host memory: xxh3_64 over the bytes that a pair of ranks exchanges.

Planes are hashed in order. Pages on a GPU have a different checksum, see cuda.pages: both ends of a transfer use the
same transport and therefore the same checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

from kv_transfer.page_check import DeviceWork
from kv_transfer.pair_plan import Side, StridedRows
from kv_transfer.transport.host_rows import gather


def block_digests(memory: memoryview, blocks: Sequence[StridedRows], items: Sequence[int]) -> list[int]:
    """Return one u64 per item (page or slot), read from `memory` (flat bytes of the whole pool)."""
    digests: list[int] = []
    for item in items:
        digest = xxhash.xxh3_64()
        for offset, size, length, rows, stride in blocks:
            start = offset + item * size
            if rows == 1:
                digest.update(memory[start : start + length])
            else:
                digest.update(gather(memory, start, length, rows, stride))
        digests.append(digest.intdigest())
    return digests


class Digests(Protocol):
    """Computes the checksums of one pool."""

    def now(self, side: Side, pages: Sequence[int], /) -> list[int]:
        """Return the checksums of pages."""
        ...

    def state(self, side: Side, slot: int, /) -> int:
        """Return the checksum of one state slot."""
        ...

    def start(
        self, side: Side, pages: Sequence[int], slot: int, /
    ) -> tuple[Sequence[int], DeviceWork] | None:
        """Begin to compute the checksums of pages, and last that of a state slot if there are states.

        They are taken before anything that is launched later changes the pages. Returns None if they have to be
        computed at once.
        """
        ...


class HostDigests:
    """Checksums of a pool in host memory."""

    def __init__(self, memory: memoryview) -> None:
        """`memory`: flat bytes of the whole pool."""
        self._memory = memory

    def now(self, side: Side, pages: Sequence[int]) -> list[int]:
        return block_digests(self._memory, side.pages, pages)

    def start(self, side: Side, pages: Sequence[int], slot: int) -> None:
        """Return None: the processor that computes checksums is that of the caller."""

    def state(self, side: Side, slot: int) -> int:
        return block_digests(self._memory, side.state, [slot])[0]


def as_digests(sums: Iterable[int]) -> list[int]:
    """Convert 64-bit sums from torch's signed integers to the unsigned ones of a record."""
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in sums]
