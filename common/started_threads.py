"""Starts the threads of a pool with its process: later there may be none left, which would end the main loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

START_SECONDS = 60.0  # in which all of them must have begun to run


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run already, so that `submit` starts none.

    `name` is the prefix of their names. Raises RuntimeError if one does not start in time.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    # A pool starts a thread only for work that no idle one takes.
    meeting = threading.Barrier(count + 1, timeout=START_SECONDS)
    try:
        for _ in range(count):
            pool.submit(meeting.wait)
        meeting.wait()
    except BaseException:
        meeting.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool
