"""Finds numbers in global memory that a kernel replaces while some of its warps may not have read them yet.

All threads of a program load a scalar, and the first one stores it. Without a barrier between the two, another warp may
read what the first one has already stored. The interpreter has no warps and cannot show this.
"""

from __future__ import annotations

import re

SCALAR_LOAD = re.compile(r"^ld\.global\.b\d+ \{ %\w+ \}, (\[ %\w+ \+ \d+ \]);")
ONE_STORE = re.compile(r"^@%p\d+ st\.global\.b\d+ (\[ %\w+ \+ \d+ \]), ")
# The beginning of another block, and a wait for all threads.
ENDS = re.compile(r"^\$L\w+:|^bar\.sync")


def racing_stores(ptx: str) -> list[str]:
    """Return the stores by one thread to a place that all threads have loaded since the last barrier."""
    found: list[str] = []
    loaded: set[str] = set()
    for line in map(str.strip, ptx.splitlines()):
        if ENDS.match(line):
            loaded.clear()
        elif load := SCALAR_LOAD.match(line):
            loaded.add(load.group(1))
        elif (store := ONE_STORE.match(line)) and store.group(1) in loaded:
            found.append(line)
    return found
