"""Finds global loads that a compiled kernel makes only after its warps have waited for each other.

The compiler keeps loads in the order of the source and does not move them before a barrier. If a kernel adds up its
result over warps first, the latency of such a load adds to its time.
"""

from __future__ import annotations

import re

BARRIER = re.compile(r"^bar\.sync")
GLOBAL_LOAD = re.compile(r"^(@!?%p\d+ )?ld\.global")


def late_loads(ptx: str) -> list[str]:
    """Return the loads from global memory after the first barrier."""
    found: list[str] = []
    waited = False
    for line in map(str.strip, ptx.splitlines()):
        waited = waited or BARRIER.match(line) is not None
        if waited and GLOBAL_LOAD.match(line):
            found.append(line)
    return found
