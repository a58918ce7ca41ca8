"""Starts a supervisor that outlives this command, and waits until its cluster is ready."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config.run_directory import unwritable
from common.errors import TandemError
from deploy.cluster_options import set_options
from deploy.process_table import BLOCK, read_table
from deploy.supervisor import AlreadyRunning, StartError, already_running

SUPERVISOR_LOG = "supervisor.log"
REFUSED = 2  # exit code of a supervisor that refuses the configuration
# The supervisor itself ends a start without progress; how long a start takes in all is not known.
TIMEOUT = 86_400.0


class StartRefused(TandemError):
    """The supervisor refused the configuration; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Started:
    """A cluster that is ready."""

    url: str
    pid: int  # of the supervisor


def start_detached(
    run_dir: Path,
    cluster: Path,
    overrides: Sequence[str],
    report: Callable[[str], None],
    keeps: Sequence[int],
) -> Started:
    """Start the cluster and return once it is ready; an interrupt ends the supervisor, too.

    The supervisor keeps the descriptors of `keeps` open until it ends.

    Raises AlreadyRunning, StartError or StartRefused with what the supervisor has said, or ConfigError if there can be
    no log.
    """
    _check_not_running(run_dir, cluster, overrides)
    command = [sys.executable, "-m", "deploy.cli", "up", str(cluster), *set_options(overrides)]
    log_path = run_dir / SUPERVISOR_LOG
    try:
        log = log_path.open("ab", buffering=0)
    except OSError as error:
        raise unwritable(run_dir, error.strerror or str(error)) from error
    with log:
        try:
            # The supervisor inherits the lock: nobody empties the file while it writes to it.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _check_not_running(run_dir, cluster, overrides)
            raise AlreadyRunning(
                f"this cluster is being started or stopped; {log_path} shows how far that is"
            ) from None
        log.truncate(0)
        try:
            # On a full disk the supervisor could not say why it ends.
            log.write(bytes(BLOCK))
        except OSError as error:
            raise unwritable(run_dir, error.strerror or str(error)) from error
        log.truncate(0)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=keeps,
        )
        try:
            return _await_ready(run_dir, process, log_path)
        except KeyboardInterrupt:
            report("stopping what was started ...")
            process.terminate()
            process.wait()
            raise


def _check_not_running(run_dir: Path, cluster: Path, overrides: Sequence[str]) -> None:
    table = read_table(run_dir)
    if table is not None:
        raise already_running(table, cluster, overrides)


def _await_ready(run_dir: Path, process: subprocess.Popen[bytes], log_path: Path) -> Started:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        table = read_table(run_dir)
        if table is not None and table.state == "ready" and table.supervisor.pid == process.pid:
            return Started(table.url, process.pid)
        if (code := process.poll()) is not None:
            said = log_path.read_text(errors="replace").strip() or f"the supervisor ended with {code}"
            raise StartRefused(said) if code == REFUSED else StartError(said)
        time.sleep(0.1)
    process.terminate()
    raise StartError(f"not ready after {TIMEOUT:.0f} s; see {log_path}")
