"""Ends a run within a bound, whatever it leaves behind: tasks that ignore their cancellation, blocked threads."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

END_SECONDS = 10.0
AGAIN_SECONDS = 1.0
EXIT_FAILED = 2  # of a run that failed by itself, not by what it tested


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float = END_SECONDS) -> list[str]:
    """Cancel the tasks and wait for them. Return where those are that have not ended after `seconds`.

    Each is cancelled every AGAIN_SECONDS: code that catches what its cancellation interrupts can lose one.
    """
    until = time.monotonic() + seconds
    while waiting := [task for task in tasks if not task.done()]:
        for task in waiting:
            task.cancel()
        left = until - time.monotonic()
        if left <= 0:
            return sorted(_place(task) for task in waiting)
        await asyncio.wait(waiting, timeout=min(AGAIN_SECONDS, left))
    return []


async def end_task(task: asyncio.Task[Any], seconds: float = END_SECONDS) -> None:
    """Cancel a task and wait for it as `end_tasks` does. Raises what it has raised by itself."""
    await end_tasks([task], seconds)
    if task.done() and not task.cancelled():
        task.result()


def _place(task: asyncio.Task[Any]) -> str:
    """Describe the task by its coroutine and the line at which it waits."""
    frames = task.get_stack(limit=1)
    at = f" at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return f"{getattr(task.get_coro(), '__qualname__', task.get_name())}{at}"


def exit_within(seconds: float) -> None:
    """End this process with EXIT_FAILED and the stacks of all threads, unless it has ended after `seconds`.

    The end of an event loop and of the interpreter wait for every thread of a pool, without a bound.
    """

    def end() -> None:
        print(f"the program did not end within {seconds:g} s:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()
        os._exit(EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
