"""A program that leaves work to the end of its process, and prints a line for each part of it that is done."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref


class _Held:
    pass


_held = _Held()


def _work() -> None:
    time.sleep(0.05)  # the main thread has ended by now
    print("thread")


if __name__ == "__main__":
    atexit.register(print, "exit function")
    weakref.finalize(_held, print, "finalizer")
    threading.Thread(target=_work).start()
    sys.exit(3)
