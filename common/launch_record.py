"""Records of processes that run without a supervisor, by which `deploy/down` finds them.

Each process keeps a file launched/NAME.PID.json in the run directory while it runs. A killed process leaves its file;
the start time in it says that the process is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.cleaned_directories import exempt_from_cleaning
from common.process_entry import Entry, entry

FOLDER = "launched"


class LaunchRecord(Entry, frozen=True, kw_only=True):
    """A process without a supervisor."""

    drain_timeout: float = 30.0  # seconds: health.drain_timeout at its start
    admin_socket: str = ""  # of a router; "" also in a record of an earlier version


@contextlib.contextmanager
def launch_record(
    run_dir: Path, name: str, drain_timeout: float, admin_socket: Path | None = None
) -> Iterator[None]:
    """Keep the record of this process. One that cannot be written is left out: a cluster runs on a full disk, too."""
    record = run_dir / FOLDER / f"{name}.{os.getpid()}.json"
    partial = record.with_suffix(".part")
    with contextlib.suppress(OSError):
        record.parent.mkdir(mode=0o700, exist_ok=True)
        for old in record.parent.glob(f"{name}.*.json"):
            process = _read(old)
            if process is None or not process.alive:
                old.unlink()
        own = entry(os.getpid())
        admin = "" if admin_socket is None else str(admin_socket)
        new = LaunchRecord(pid=own.pid, started=own.started, drain_timeout=drain_timeout, admin_socket=admin)
        partial.write_bytes(msgspec.json.encode(new))
        partial.replace(record)
    # A write that failed has left it.
    with contextlib.suppress(OSError):
        partial.unlink()
    try:
        with exempt_from_cleaning(run_dir):
            yield
    finally:
        with contextlib.suppress(OSError):
            record.unlink()


def launched(run_dir: Path) -> list[tuple[str, LaunchRecord]]:
    """Return names and records of this user's processes that run here without a supervisor, in order of names."""
    found = ((file.name.partition(".")[0], _read(file)) for file in sorted((run_dir / FOLDER).glob("*.json")))
    return [(name, each) for name, each in found if each is not None and each.alive and _is_ours(each.pid)]


def _read(file: Path) -> LaunchRecord | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=LaunchRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False
