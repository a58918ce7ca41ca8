"""Puts the memory that a process has at the end of its start on huge pages, where Linux can do that (from 6.1 on).

A request reaches a process that has slept and whose caches others have filled: each page of 4 KiB that it then touches
is looked up anew, by the interpreter for its objects and by a forward on a CPU for its weights.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

HUGE: Final = 2 << 20  # bytes
SMALL: Final = os.sysconf("SC_PAGESIZE")
# Part of a huge page that must be in memory already: the rest is memory that the process gains.
FULL: Final = 0.75
MAX_AT_ONCE: Final = 32  # huge pages; each call makes all CPUs empty their lists of pages first
SECONDS: Final = 2.0  # after which the rest stays as it is
MADV_COLLAPSE: Final = 25
# A driver of a GPU pins memory of the process, and nothing was measured beside one.
GPU: Final = "/dev/nvidia"

# From an address to the part of the huge page there that is in memory.
Resident = Callable[[int], float]
# Takes an address and a number of bytes.
Collapse = Callable[[int, int], object]


def use_huge_pages() -> int:
    """Return how many bytes of private memory are on huge pages now."""
    with open("/proc/self/maps") as file:
        maps = file.read().splitlines()
    libc = ctypes.CDLL(None)
    found = (ctypes.c_ubyte * (HUGE // SMALL))()

    def resident(address: int) -> float:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), found):
            return 0.0
        return sum([each & 1 for each in found]) / len(found)

    def collapse(address: int, nbytes: int) -> None:
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MADV_COLLAPSE)

    collapse_all(maps, resident, collapse, time.monotonic)
    with open("/proc/self/smaps_rollup") as file:
        return sum([int(line.split()[1]) << 10 for line in file if line.startswith("AnonHugePages:")])


def collapse_all(
    maps: Iterable[str], resident: Resident, collapse: Collapse, clock: Callable[[], float]
) -> None:
    """Collapse what `maps`, the lines of /proc/PID/maps, has of private memory, unless the process uses a GPU."""
    lines = list(maps)
    if any(GPU in line for line in lines):
        return
    until = clock() + SECONDS
    for address, nbytes in _runs(_huge_pages(lines), resident):
        if clock() > until:
            break
        collapse(address, nbytes)


def _huge_pages(maps: Iterable[str]) -> Iterator[int]:
    """Yield the addresses of the whole huge pages in private memory that can be written and that no file holds."""
    for line in maps:
        area, rights, _, _, _, *name = line.split()
        if rights != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(each, 16) for each in area.split("-"))
        yield from range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE)


def _runs(addresses: Iterable[int], resident: Resident) -> Iterator[tuple[int, int]]:
    """Yield address and size of what is to be collapsed: pages in memory that follow each other are one piece."""
    start = end = 0
    for address in addresses:
        if resident(address) < FULL:
            continue
        if address != end or end - start >= MAX_AT_ONCE * HUGE:
            if end > start:
                yield start, end - start
            start = address
        end = address + HUGE
    if end > start:
        yield start, end - start
