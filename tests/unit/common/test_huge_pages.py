"""Which memory a process puts on huge pages."""

from __future__ import annotations

import mmap

import pytest

from common import huge_pages
from common.huge_pages import FULL, HUGE, collapse_all, use_huge_pages

MAPS = f"""\
400000-{0x400000 + 4 * HUGE:x} r-xp 00000000 08:01 1 /usr/bin/python
{10 * HUGE + 4096:x}-{14 * HUGE:x} rw-p 00000000 00:00 0 [heap]
{20 * HUGE:x}-{22 * HUGE + 4096:x} rw-p 00000000 00:00 0
{30 * HUGE:x}-{32 * HUGE:x} rw-p 00000000 08:01 2 /tmp/a file
{40 * HUGE:x}-{42 * HUGE:x} rw-s 00000000 00:01 3 /dev/shm/pool
{50 * HUGE:x}-{52 * HUGE:x} rw-p 00000000 00:00 0 [stack]
{60 * HUGE + 4096:x}-{61 * HUGE - 4096:x} rw-p 00000000 00:00 0
""".splitlines()


class Memory:
    """Memory of which some huge pages are partly there; notes what is collapsed, in huge pages."""

    def __init__(self, parts: dict[int, float] | None = None, seconds: float = 0.0) -> None:
        """`parts`: of huge pages, by number; the others are there. Each call of `collapse` takes so many seconds."""
        self.collapsed: list[tuple[int, int]] = []
        self._parts = parts or {}
        self._seconds = seconds
        self._now = 0.0

    def resident(self, address: int) -> float:
        return self._parts.get(address // HUGE, 1.0)

    def collapse(self, address: int, nbytes: int) -> None:
        self.collapsed.append((address // HUGE, nbytes // HUGE))
        self._now += self._seconds

    def clock(self) -> float:
        return self._now


def collapsed(memory: Memory, maps: list[str]) -> list[tuple[int, int]]:
    collapse_all(maps, memory.resident, memory.collapse, memory.clock)
    return memory.collapsed


def test_only_whole_huge_pages_of_private_memory_are_taken_and_neighbours_together() -> None:
    assert collapsed(Memory(), MAPS) == [(11, 3), (20, 2)]


def test_memory_that_is_not_there_yet_is_left_alone() -> None:
    memory = Memory({11: FULL, 12: FULL - 0.01, 20: 0.0})
    assert collapsed(memory, MAPS) == [(11, 1), (13, 1), (21, 1)]


def test_a_large_area_is_taken_in_pieces_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MAX_AT_ONCE", 4)
    maps = [f"{100 * HUGE:x}-{110 * HUGE:x} rw-p 00000000 00:00 0"]
    assert collapsed(Memory(), maps) == [(100, 4), (104, 4), (108, 2)]
    assert collapsed(Memory(seconds=1.5), maps) == [(100, 4), (104, 4)]


def test_a_process_with_a_gpu_is_left_alone() -> None:
    assert not collapsed(Memory(), [*MAPS, "7f0000000000-7f0000001000 rw-s 00000000 00:06 4 /dev/nvidia0"])


def test_real_memory_keeps_its_bytes() -> None:
    with mmap.mmap(-1, 4 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        content = bytes(range(256)) * (4 * HUGE // 256)
        own.write(content)
        assert use_huge_pages() % HUGE == 0
        assert own[:] == content
