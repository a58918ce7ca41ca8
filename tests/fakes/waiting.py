"""Waiting for other threads and processes, long enough for a machine that stalls for seconds.

A passing test never waits that long, and no test outcome depends on how fast something was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 60.0  # seconds


def until(condition: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Poll until the condition is true and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)
    return value


async def eventually(condition: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Like `until`, on the event loop."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.001)
    return value
