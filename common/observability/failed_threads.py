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
from collections.abc import Callable, Iterator

from common.observability.logs import Log
from common.observability.loop_watchdog import LAST_WORDS_SECONDS, end_later

EXIT_THREAD_FAILED = 5
OURS = frozenset({"common", "decode_node", "deploy", "kv_transfer", "prefill_node", "router"})  # packages


def end_with_failed_threads(log: Log) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the process ends with EXIT_THREAD_FAILED when an exception has ended a thread."""

    def end(failure: threading.ExceptHookArgs) -> None:
        end_later(LAST_WORDS_SECONDS)
        log.error("a thread has failed: the process ends", **_described(failure))
        os._exit(EXIT_THREAD_FAILED)

    return _hooked(end)


def log_failed_threads(log: Log) -> contextlib.AbstractContextManager[None]:
    """Return a context in which each thread that an exception ends is logged, and the process goes on."""

    def tell(failure: threading.ExceptHookArgs) -> None:
        log.error(
            "a thread has failed: restart this process when its streams have ended", **_described(failure)
        )

    return _hooked(tell)


@contextlib.contextmanager
def _hooked(handle: Callable[[threading.ExceptHookArgs], None]) -> Iterator[None]:
    """Handle failures of our threads. Threads that libraries run by themselves are left to the hook before."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        (handle if _is_ours(failure) else before)(failure)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _described(failure: threading.ExceptHookArgs) -> dict[str, str]:
    """Return the name of the thread, and its stack."""
    stack = traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    return {"thread": "?" if failure.thread is None else failure.thread.name, "exception": "".join(stack)}


def _is_ours(failure: threading.ExceptHookArgs) -> bool:
    frames = traceback.walk_tb(failure.exc_traceback)
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] in OURS for frame, _ in frames)
