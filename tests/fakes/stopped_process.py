"""Tells whether another process is stopped: SIGSTOP takes effect some time after it is sent."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped the main thread of a process. Raises OSError if there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"
