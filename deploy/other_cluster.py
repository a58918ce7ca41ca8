"""Distinguishes the cluster that a command names from one of another file that runs in the same run directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from deploy.cluster_options import down_line
from deploy.process_table import Table, read_table


def other_cluster(table: Table | None, file: Path, overrides: Iterable[str]) -> str:
    """Return a sentence about the running cluster if it was started from another file than `file`; "" otherwise.

    A file that no longer exists may have been renamed to `file`.
    """
    if table is None:
        return ""
    try:
        if os.path.samefile(table.cluster, file):
            return ""
    except OSError:
        return ""
    return (
        f"the run directory is in use by the cluster of {table.cluster} (pid {table.supervisor.pid}), which "
        f"{down_line(table.cluster, overrides)} stops"
    )


def require_own_cluster(run_dir: Path, file: Path, overrides: Iterable[str]) -> None:
    """Raise ConnectionError if what answers in the run directory is the cluster of another file than `file`."""
    if other := other_cluster(read_table(run_dir), file, overrides):
        raise ConnectionError(other)
