"""An exclusive lock among processes that change the same files, which take milliseconds for it."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from common.errors import ConfigError

LOCK_SECONDS = 10.0
LOOK_SECONDS = 0.01


def lock(descriptor: int, path: Path) -> None:
    """Lock an open file or directory until its descriptor is closed.

    Raises ConfigError if another process holds the lock for LOCK_SECONDS.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                problem = f"another process has held the lock of {path} for {LOCK_SECONDS:g} s; end it"
                raise ConfigError("", problem) from None
            time.sleep(LOOK_SECONDS)
