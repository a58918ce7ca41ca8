"""The state file of a running cluster: its processes, their restarts with reasons, and known problems."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from common.process_entry import Entry

State = Literal["starting", "ready", "stopping"]
ProcessState = Literal["starting", "up", "backing off"]
BLOCK = 4096  # bytes; file systems allocate space in blocks of this size or a multiple
READ_ATTEMPTS = 5
READ_INTERVAL = 0.02  # seconds


class ProcessRecord(Entry, frozen=True, kw_only=True):
    """One process of the cluster: the running one or, while the state is "backing off", the previous one."""

    state: ProcessState = "starting"
    restarts: int = 0
    restart_at: float | None = None  # monotonic seconds of this host; set while backing off
    ended_at: float | None = None  # monotonic seconds at which the previous process ended
    last_end: str = ""  # exit code or signal, and last log line, of the previous process


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the supervisor writes and `deploy/status` and `deploy/down` read."""

    supervisor: Entry
    cluster: str
    url: str
    state: State
    processes: dict[str, ProcessRecord]
    drain_timeout: float = 30.0  # seconds: health.drain_timeout
    admin_socket: str = ""  # of the routers; "" in a table of an earlier version: in the run directory
    # what the supervisor cannot do now: a full disk, a log that cannot be opened
    problems: list[str] = []


def table_path(run_dir: Path) -> Path:
    return run_dir / "cluster.json"


def read_table(run_dir: Path) -> Table | None:
    """Return the table of a living supervisor; None if there is none, or only the table of a killed one."""
    table = read_any_table(run_dir)
    return table if table is not None and table.supervisor.alive else None


def read_any_table(run_dir: Path) -> Table | None:
    """Return the table on disk, even if its supervisor was killed."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return msgspec.json.decode(table_path(run_dir).read_bytes(), type=Table)
        except OSError:
            return None
        except ValueError:  # it may be overwritten in place right now
            if attempt < READ_ATTEMPTS - 1:
                time.sleep(READ_INTERVAL)
    return None


def write_table(run_dir: Path, table: Table) -> None:
    """Replace the file atomically or, on a full disk, overwrite it in place. Raises OSError if neither works.

    The file is padded to twice the length of its content, so that later tables fit into the blocks it already has.
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
    """Write into the existing blocks of the file; a reader that sees a partial write retries."""
    with path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if len(text) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.write(text.ljust(size))
