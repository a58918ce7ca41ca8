"""Finds missing barriers in compiled kernels. The interpreter has no warps and cannot show them.

All threads of a program load a scalar, and the first one stores it: without a barrier between the two, another warp may
read what the first one has already stored. And one thread counts a program whose threads have all stored a part of its
results: without a barrier, the reader of the count may read results that another warp has yet to store.
"""

from __future__ import annotations

import re

SCALAR_LOAD = re.compile(r"^ld\.global\.b\d+ \{ %\w+ \}, (\[ %\w+ \+ \d+ \]);")
ONE_STORE = re.compile(r"^@%p\d+ st\.global\.b\d+ (\[ %\w+ \+ \d+ \]), ")
BARRIER = re.compile(r"^bar\.sync")
# The beginning of another block, and a wait for all threads.
ENDS = re.compile(rf"^\$L\w+:|{BARRIER.pattern}")
STORE = re.compile(r"^(@%p\d+ )?st\.global")
COUNT = re.compile(r"^(@%p\d+ )?atom\.global")


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


def early_counts(ptx: str) -> list[str]:
    """Return the atomic operations of one thread before which others may not have made their stores."""
    found: list[str] = []
    stored = False
    for line in map(str.strip, ptx.splitlines()):
        if BARRIER.match(line):
            stored = False
        elif STORE.match(line):
            stored = True
        elif stored and COUNT.match(line):
            found.append(line)
    return found
