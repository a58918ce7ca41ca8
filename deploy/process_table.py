"""The state file of a running cluster: its processes, how often each was restarted and why, and known problems."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["starting", "ready", "stopping"]
ProcessState = Literal["starting", "up", "backing off"]
BLOCK = 4096  # bytes; file systems allocate space in blocks of this size or a multiple
READ_ATTEMPTS = 5
READ_INTERVAL = 0.02  # seconds


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    started: int  # clock ticks since boot, field 22 of /proc/PID/stat

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class ProcessRecord(Entry, frozen=True, kw_only=True):
    """One process of the cluster: the one that runs or, while the state is "backing off", the last that ran."""

    state: ProcessState = "starting"
    restarts: int = 0
    restart_at: float | None = None  # monotonic seconds of this host; set while backing off
    ended_at: float | None = None  # monotonic seconds; when the process before this one ended
    last_end: str = ""  # exit code or signal, and last log line, of the process before this one


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the supervisor, read by `deploy/status` and `deploy/down`."""

    supervisor: Entry
    cluster: str
    url: str
    state: State
    processes: dict[str, ProcessRecord]
    problems: list[
        str
    ] = []  # what the supervisor cannot do at present: a full disk, a log that cannot be opened


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
    table = read_any_table(run_dir)
    return table if table is not None and table.supervisor.alive else None


def read_any_table(run_dir: Path) -> Table | None:
    """The table as it is on disk, also that of a supervisor that was killed."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return msgspec.json.decode(table_path(run_dir).read_bytes(), type=Table)
        except OSError:
            return None
        except msgspec.DecodeError:  # it may just be overwritten in place
            if attempt < READ_ATTEMPTS - 1:
                time.sleep(READ_INTERVAL)
    return None


def write_table(run_dir: Path, table: Table) -> None:
    """Replace the file as a whole or, on a full disk, overwrite it in place. Raises OSError if neither works.

    The file is padded to twice its length, so that later tables fit into the blocks that it has already.
    """
    text = msgspec.json.encode(table)
    data = text.ljust(-(-2 * len(text) // BLOCK) * BLOCK)
    temporary = run_dir / f".cluster.{os.getpid()}"
    try:
        temporary.write_bytes(data)
        temporary.replace(table_path(run_dir))
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not table_path(run_dir).exists():
            raise
        _overwrite(table_path(run_dir), text)


def _overwrite(path: Path, text: bytes) -> None:
    """Write into the blocks that the file has; a reader in the same instant reads it again."""
    with path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if len(text) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.write(text.ljust(size))
