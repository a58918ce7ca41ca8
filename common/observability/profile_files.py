"""The files of profiles: named after their process and the time at which they were written, and few."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

KEPT_FILES = 8  # of a process


def new_file(directory: Path, name: str, ending: str) -> Path:
    """Return the path of a profile that is to be written now."""
    return directory / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}{ending}"


def keep_latest(directory: Path, name: str, ending: str) -> None:
    """Remove all but the latest files of a process."""
    for old in sorted(directory.glob(f"{name}-{'[0-9]' * 8}T*{ending}"))[:-KEPT_FILES]:
        old.unlink(missing_ok=True)
