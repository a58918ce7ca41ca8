"""Writes to standard error without a buffer, and bounds the size of its file.

The supervisor opens one log file per process as stdout and stderr, so tracebacks and crash messages of native code go
to the same file as log lines. The process rotates that file itself: it renames it to `NAME.log.1`, opens a new one
and replaces both descriptors. So a rotation loses nothing and needs no supervisor.

Where standard error is a pipe, a socket or a terminal, its reader may stop: a container's runtime that is stuck, a
journal whose disk is full. No process of a cluster waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import time
from pathlib import Path

STDOUT, STDERR = 1, 2
PIPE_BYTES = 1 << 20  # what Linux allows every user; a pipe has 64 KiB otherwise
ROOM_SECONDS = 0.05  # for which the lines of ROOM_INTERVAL seconds wait, in all, for a reader that is slow
ROOM_INTERVAL = 10.0


def never_wait_for_readers() -> None:
    """Let writes to standard output and error fail where they would have to wait. Call it at the start of a process.

    Python, native code and the dump of all stacks that ends a process write there, so the descriptors themselves
    change. Files are left as they are.
    """
    for descriptor in (STDOUT, STDERR):
        # Without the right to open it again, or with no reader at all, it stays as it is.
        with contextlib.suppress(OSError):
            _never_wait(descriptor)


def _never_wait(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        # A socket cannot be opened again: no other process that has it waits any longer, either.
        os.set_blocking(descriptor, False)
    elif stat.S_ISFIFO(mode) or os.isatty(descriptor):
        # The process that started this one has the same open file, and may rely on waiting.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.dup2(own, descriptor)
        finally:
            os.close(own)
        if stat.S_ISFIFO(mode):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def has_room(seconds: float = 0.0) -> bool:
    """Return whether standard error takes output now, or within some seconds. A terminal takes none after Ctrl-S."""
    waiting = select.poll()
    waiting.register(STDERR, select.POLLOUT)
    return bool(waiting.poll(seconds * 1000))


class RoomPatience:
    """Waits for a slow reader of standard error, but not so often that it slows down the loops that log."""

    def __init__(self) -> None:
        self._since = -ROOM_INTERVAL  # monotonic seconds
        self._left = 0.0  # seconds

    def await_room(self) -> bool:
        """Wait until there is room. Return False once all waits since the interval began have taken ROOM_SECONDS."""
        now = time.monotonic()
        if now - self._since >= ROOM_INTERVAL:
            self._since, self._left = now, ROOM_SECONDS
        if self._left <= 0:
            return False
        found = has_room(self._left)
        self._left -= time.monotonic() - now
        return found


def write_stderr(text: str) -> None:
    """Write one line; a full disk or a closed pipe is ignored."""
    with contextlib.suppress(OSError):
        os.write(STDERR, text.encode(errors="replace") + b"\n")


class StderrFile:
    """The regular file of standard error; a terminal or a pipe is never rotated."""

    def __init__(self, max_bytes: int, only: Path | None = None) -> None:
        """Rotate the file at `max_bytes`, keeping one old file.

        `only`: the file to rotate; others are not rotated.
        """
        self._max_bytes = max_bytes
        self._path: Path | None = None
        with contextlib.suppress(OSError):
            current = os.fstat(STDERR)
            if stat.S_ISREG(current.st_mode) and (only is None or os.path.samestat(only.stat(), current)):
                self._path = Path(os.readlink(f"/proc/self/fd/{STDERR}"))

    def ends_within_a_line(self) -> bool:
        """Return whether the last line was cut, as an earlier process leaves it on a full disk."""
        if self._path is None:
            return False
        try:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:  # the file is empty, or cannot be read
            return False

    def make_room(self, nbytes: int) -> None:
        """Rotate if `nbytes` more would exceed the limit; truncate the file if it cannot be rotated."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            # Reads the size by lseek, which is cheaper than fstat; the supervisor opens files for appending.
            if os.lseek(STDERR, 0, os.SEEK_END) + nbytes <= self._max_bytes:
                return
            try:
                self._rotate(self._path, os.fstat(STDERR))
            except OSError:
                os.ftruncate(STDERR, 0)

    def _rotate(self, path: Path, current: os.stat_result) -> None:
        with contextlib.suppress(FileNotFoundError):
            # Another process may have moved the file: then only a new one is missing.
            if os.path.samestat(path.stat(), current):
                path.replace(path.with_name(f"{path.name}.1"))
        fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for descriptor in (STDOUT, STDERR):
                if _leads_to(descriptor, current):
                    os.dup2(fresh, descriptor)
        finally:
            os.close(fresh)


def _leads_to(descriptor: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False
