"""Notices threads of this process that an unexpected exception has ended.

What such a thread did is not done any more: peers cannot connect, pages do not arrive, heartbeats fail to come. A node
ends, so that its supervisor starts it again and its requests continue elsewhere. A router goes on, because its streams
would end with it; its log says that it should be restarted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator

from common.observability.logs import Log
from common.observability.loop_watchdog import LAST_WORDS_SECONDS, end_later

EXIT_THREAD_FAILED = 5
OURS = frozenset({"common", "decode_node", "deploy", "kv_transfer", "prefill_node", "router"})  # packages


@contextlib.contextmanager
def failed_threads(log: Log, ends: bool) -> Iterator[None]:
    """Log each thread that an exception ends in this context, with its stack.

    Threads that libraries run by themselves are left to the hook that was set before.

    Args:
        ends: end the process with EXIT_THREAD_FAILED, too.
    """
    before = threading.excepthook

    def notice(failure: threading.ExceptHookArgs) -> None:
        if not _is_ours(failure):
            before(failure)
            return
        if ends:
            end_later(LAST_WORDS_SECONDS)
        name = "?" if failure.thread is None else failure.thread.name
        stack = "".join(
            traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
        )
        remedy = "the process ends" if ends else "restart this process when its streams have ended"
        log.error(f"a thread has failed: {remedy}", thread=name, exception=stack)
        if ends:
            os._exit(EXIT_THREAD_FAILED)

    threading.excepthook = notice
    try:
        yield
    finally:
        threading.excepthook = before


def _is_ours(failure: threading.ExceptHookArgs) -> bool:
    frames = traceback.walk_tb(failure.exc_traceback)
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] in OURS for frame, _ in frames)
