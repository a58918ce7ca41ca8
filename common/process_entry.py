"""Names one process of this host by pid and start time, so that a later process with the same pid is never meant."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    started: int  # clock ticks since boot, field 22 of /proc/PID/stat

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is alive: the descriptor holds the process, so a later one with its pid gets nothing.

        Where the kernel gives no such descriptor, as in some containers, its pid has to do.
        """
        with contextlib.suppress(ProcessLookupError):
            try:
                descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return
            except OSError:
                if self.alive:
                    os.kill(self.pid, number)
                return
            try:
                if self.alive:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def start_time(pid: int) -> int | None:
    """Return None if there is no such process, or only its zombie."""
    try:
        fields = _after_name(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def processor_seconds(pid: int) -> float:
    """Return how long the process has run on processors so far, to 10 ms; 0 if there is no such process."""
    try:
        user, system = _after_name(pid)[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _after_name(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one, the state, on. Raises OSError."""
    # the name between the brackets may hold anything, brackets and broken UTF-8 included
    return Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(") ")[2].split()


def entry(pid: int) -> Entry:
    return Entry(pid=pid, started=start_time(pid) or 0)
