"""The state file of a running cluster: who runs, since when, and how far start-up has come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["starting", "ready", "stopping"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    started: int  # clock ticks since boot, field 22 of /proc/PID/stat

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the supervisor, read by `deploy/status` and `deploy/down`."""

    supervisor: Entry
    cluster: str
    url: str
    state: State
    processes: dict[str, Entry]


def start_time(pid: int) -> int | None:
    """None if there is no such process, or only its zombie."""
    try:
        # the name between the brackets may hold anything, brackets and broken UTF-8 included
        fields = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def entry(pid: int) -> Entry:
    return Entry(pid=pid, started=start_time(pid) or 0)


def table_path(run_dir: Path) -> Path:
    return run_dir / "cluster.json"


def read_table(run_dir: Path) -> Table | None:
    """The table of a supervisor that is alive; None if there is none, or only what a killed one left."""
    try:
        table = msgspec.json.decode(table_path(run_dir).read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError):
        return None
    return table if table.supervisor.alive else None


def write_table(run_dir: Path, table: Table) -> None:
    """Replaces the file as a whole: a reader never sees half of it."""
    temporary = run_dir / f".cluster.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(table))
    temporary.replace(table_path(run_dir))
