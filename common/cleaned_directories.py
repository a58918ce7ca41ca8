"""Keeps files in /tmp from programs that remove old files there.

systemd-tmpfiles removes files in /tmp that nobody has used for some days, unless their directory or one above it is
locked (tmpfiles.d(5)). A cluster reads its file only when a process starts, which may be weeks later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exempt_from_cleaning(*directories: Path) -> Iterator[None]:
    """Keep everything below these directories within this context. Without locks there it is not kept."""
    with contextlib.ExitStack() as held:
        for directory in directories:
            with contextlib.suppress(OSError):
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, descriptor)
                # Shared: others keep the same directory.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
