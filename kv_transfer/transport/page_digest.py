"""The checksum of a page in host memory: xxh3_64 over its slice of every plane, in plane order.

Pages on a GPU have another one, see cuda_pages: the two ends of a transfer use the same transport and so the
same checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from common.kv_cache.pool_layout import PoolLayout


def page_digests(memory: memoryview, layout: PoolLayout, pages: Sequence[int]) -> list[int]:
    """One u64 per page, read from `memory` (flat bytes, at least layout.total_bytes)."""
    digests: list[int] = []
    for page in pages:
        digest = xxhash.xxh3_64()
        for plane in layout.planes:
            start = plane.offset + page * plane.page_bytes
            digest.update(memory[start : start + plane.page_bytes])
        digests.append(digest.intdigest())
    return digests


def as_digests(sums: Iterable[int]) -> list[int]:
    """64-bit sums as torch has them (signed) as they go into a record."""
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in sums]
