"""Checks that a command can write its result, before it measures anything."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError


def check_result_file(file: Path) -> None:
    """Raise ConfigError for a folder, and for a file in a folder that does not exist."""
    if file.is_dir():
        raise ConfigError(str(file), "is a folder, not a file")
    if not file.absolute().parent.is_dir():
        raise ConfigError(str(file), f"there is no folder {file.absolute().parent}")
