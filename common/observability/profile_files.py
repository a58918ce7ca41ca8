"""The files of profiles: named after their process and the time at which they were written, and few."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

KEPT_FILES = 8  # of a process


def new_file(directory: Path, name: str, ending: str) -> Path:
    """Return the path of a profile that is to be written now."""
    return directory / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}{ending}"


def keep_latest(latest: Path, name: str, ending: str) -> None:
    """Remove all but `latest`, which has just been written, and the other latest files of a process.

    The name of `latest` is not the last one if the clock was set back.
    """
    found = latest.parent.glob(f"{name}-{'[0-9]' * 8}T*{ending}")
    for old in sorted(each for each in found if each != latest)[: 1 - KEPT_FILES]:
        old.unlink(missing_ok=True)
