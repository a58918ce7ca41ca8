"""Identifies a process on this host and detects reliably that it has ended."""

from __future__ import annotations

import os
import select
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import ConfigError

FOREIGN_PROC = (
    "/proc shows the processes of another pid namespace, such as those of the host in a container: mount the "
    "container's own /proc"
)


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identifies one process; the start time distinguishes it from a later one with the same pid."""

    # Boot id and pid namespace: pids are comparable only within them.
    host: Annotated[str, msgspec.Meta(max_length=128)]
    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    started: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # clock ticks since boot


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if the kernel does not provide it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if there is no such process.

    Raises OSError if that cannot be read, as without a free descriptor: the process may be alive.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _ticks_in(stat)


def check_proc() -> None:
    """Raise ConfigError if /proc shows processes under other pids than they have here.

    Then a pid says nothing about the start and the end of its process.
    """
    try:
        shown = os.readlink("/proc/self")
    except FileNotFoundError:
        shown = ""
    if shown != str(os.getpid()):
        raise ConfigError("transfer.transport", f"{FOREIGN_PROC}, or choose another transport")


@cache
def current() -> ProcessIdentity:
    """Return the identity of this process, which is read once: later there may be no free descriptor.

    It is right even if /proc shows this process under another pid. Raises ConfigError if it does not show it at all.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = _ticks_in(Path("/proc/self/stat").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError("", f"{error.filename} does not exist: {FOREIGN_PROC}") from None
    return ProcessIdentity(f"{boot}/{pid_namespace()}", os.getpid(), started)


def _ticks_in(stat: bytes) -> int:
    """Return the start time that /proc/PID/stat contains."""
    fields = stat.rpartition(b") ")[2].split()  # the name in parentheses may contain anything
    return int(fields[19])


os.register_at_fork(after_in_child=current.cache_clear)


class ProcessWatch:
    """Holds a pidfd, so that pid reuse cannot confuse the answer. A stopped process counts as alive."""

    def __init__(self, process: ProcessIdentity) -> None:
        """Watch a process. Raises OSError when a living process cannot be watched."""
        self._fd = -1
        try:
            self._fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        # Compared after the open: the fd pins the pid.
        try:
            started = start_ticks(process.pid)
        except OSError:
            self.close()
            raise
        # None: it has ended since, or is hidden from this user. The fd tells.
        if started not in (None, process.started):
            self.close()

    @property
    def dead(self) -> bool:
        """True once every thread of the process has ended (reaped or not); a stopped process is not dead."""
        if self._fd < 0:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(0):
            return False
        self.close()
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def has_ended(pid: int, started: int) -> bool:
    """Return whether a process has ended, whether or not its parent has collected its exit code.

    Raises OSError if its start time cannot be read.
    """
    if start_ticks(pid) != started:
        return True
    try:
        watch = ProcessWatch(ProcessIdentity("", pid, started))
    except OSError:  # a kernel without pidfds
        return False
    ended = watch.dead
    watch.close()
    return ended
