"""Who a process is on this host, and proof that it is gone."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Annotated

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process, unmistakable: the start time tells it from a later one with the same pid."""

    host: Annotated[str, msgspec.Meta(max_length=128)]  # boot id + pid namespace: pids compare only within it
    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    started: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # clock ticks since boot


def pid_namespace() -> int:
    """Inode of this process's pid namespace; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (OSError, ValueError):
        return None
    fields = stat.rpartition(b") ")[2].split()  # the name in parentheses may contain anything
    return int(fields[19])


def current() -> ProcessIdentity:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid = os.getpid()
    return ProcessIdentity(f"{boot}/{pid_namespace()}", pid, start_ticks(pid) or 0)


class ProcessWatch:
    """Holds a pidfd, so the answer cannot be confused by pid reuse. A stopped process is alive."""

    def __init__(self, process: ProcessIdentity) -> None:
        """Raises OSError when the kernel does not let us watch a living process."""
        self._fd = -1
        try:
            self._fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        if start_ticks(process.pid) != process.started:  # after the open: the fd pins the pid
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
