"""A profile of a router process: a thread samples the stack of the event loop and writes how often it saw each.

A sample takes some microseconds, where a profiler that is called with every function would halve the throughput.
"""

from __future__ import annotations

import gzip
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from common.observability.profile_files import keep_latest, new_file

SAMPLE_SECONDS = 0.005
MAX_FRAMES = 100  # of a stack, the innermost ones
MAX_STACKS = 20_000  # different ones in a file
ENDING = ".stacks.txt.gz"


def sample(thread: int, seconds: float, ended: threading.Event) -> Counter[str]:
    """Return the stacks of a thread in the next `seconds` and their counts: frames from the outermost on, with `;`.

    `ended` ends it early.
    """
    stacks: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not ended.is_set():
        frame = sys._current_frames().get(thread)
        if frame is None:
            break
        stack = _folded(frame)
        if stack in stacks or len(stacks) < MAX_STACKS:
            stacks[stack] += 1
        ended.wait(SAMPLE_SECONDS)
    return stacks


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < MAX_FRAMES:
        code = frame.f_code
        names.append(f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(names))


def write_profile(
    name: str, directory: Path, seconds: float, ended: threading.Event, thread: int | None = None
) -> tuple[Path, int]:
    """Sample the main thread, or the one given; return the file and the number of samples. Raises OSError.

    It blocks for `seconds`, or until somebody sets `ended`.
    """
    if thread is None:
        thread = threading.main_thread().ident or 0
    stacks = sample(thread, seconds, ended)
    file = new_file(directory, name, ENDING)
    part = file.with_suffix(".part")
    try:
        with gzip.open(part, "wt") as out:
            out.writelines(f"{stack} {count}\n" for stack, count in stacks.most_common())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    keep_latest(file, name, ENDING)
    return file, stacks.total()
