"""The checksum of a page: xxh3_64 over its slice of every plane, in plane order."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kv_transfer.layout import KvLayout


def page_digests(memory: memoryview, layout: KvLayout, pages: Sequence[int]) -> list[int]:
    """One u64 per page, read from `memory` (flat bytes, at least layout.total_bytes)."""
    digests: list[int] = []
    for page in pages:
        digest = xxhash.xxh3_64()
        for plane in layout.planes:
            start = plane.offset + page * plane.page_bytes
            digest.update(memory[start : start + plane.page_bytes])
        digests.append(digest.intdigest())
    return digests
