"""Detects that the disk of the run directory is full or read-only, so that logs and the process table are lost."""

from __future__ import annotations

import os
from pathlib import Path

MIN_FREE_BYTES = 1 << 20


def disk_problem(run_dir: Path) -> str | None:
    """Return a sentence with the path and the remedy, or None."""
    try:
        info = os.statvfs(run_dir)
    except OSError as error:
        return f"{run_dir} cannot be read ({error.strerror}): restore it, or restart the cluster"
    if info.f_flag & os.ST_RDONLY:
        return f"{run_dir} is on a read-only file system: logs are lost until it is writable"
    free = info.f_bfree if os.geteuid() == 0 else info.f_bavail
    if info.f_blocks and free * info.f_frsize < MIN_FREE_BYTES:
        return f"the disk of {run_dir} is full (under 1 MiB free): log lines are lost until there is space"
    if info.f_files and not info.f_ffree:
        return f"the disk of {run_dir} has no inode left: log lines are lost until files are removed"
    return None
