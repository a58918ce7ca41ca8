"""The heap is trimmed after connections have ended, and not too often."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from router.process.freed_memory import TRIM_SECONDS, FreedMemory
from tests.fakes.clock import Clock
from tests.fakes.router_rig import router_rig
from tests.fakes.waiting import eventually

ROOT = Path(__file__).resolve().parents[4]


async def test_memory_is_given_back_once_after_connections_have_ended() -> None:
    clock = Clock()
    trims: list[float] = []
    memory = FreedMemory(lambda: trims.append(clock.now), clock)
    await memory.give_back()
    assert not trims, "no connection has ended"
    for _ in range(3):
        memory.connection_ended()
    await memory.give_back()
    await memory.give_back()
    assert trims == [1000.0]
    memory.connection_ended()
    clock.now += TRIM_SECONDS / 2
    await memory.give_back()
    assert trims == [1000.0], "the latest one was a moment ago"
    clock.now += TRIM_SECONDS / 2
    await memory.give_back()
    assert trims == [1000.0, 1000.0 + TRIM_SECONDS]


async def test_the_router_gives_memory_back_when_a_connection_has_ended() -> None:
    trims: list[bool] = []
    async with router_rig() as rig:
        rig.control.freed_memory = FreedMemory(lambda: trims.append(True))
        stranger = rig.fake("decode", "decode-9")
        await stranger.register()
        assert not trims
        stranger.close()
        await eventually(lambda: trims)


PROGRAM = """
import ctypes
from router.process.freed_memory import find_trim

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

blocks = [libc.malloc(16_000) for _ in range(8_000)]
for block in blocks:
    ctypes.memset(block, 1, 16_000)
kept = libc.malloc(16_000)
for block in blocks:
    libc.free(block)
before = resident_mib()
find_trim()()
print(before, resident_mib())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_lies_below_a_block_in_use_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT
    )
    before, after = map(int, done.stdout.split())
    assert before - after > 100, done.stdout
