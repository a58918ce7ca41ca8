"""Tells whether another process is stopped: SIGSTOP takes effect some time after it is sent."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped all threads of a process. Raises OSError if there is none."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((each / "stat").read_text().rpartition(") ")[2][0] == "T" for each in threads)
