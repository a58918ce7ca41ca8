"""Reads the command lines of running processes, which identify those of a cluster without any record."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from common.config.router_processes import router_name
from common.config.run_directory import KEY as RUN_DIR
from common.config.yaml_file import parse_scalar
from common.resolved_path import resolved_path
from deploy.cluster_options import RUN_DIR_VARIABLE

PROC = Path("/proc")
SUPERVISOR = "the supervisor"  # no process of a cluster has this name


class RunningProcess(NamedTuple):
    """A process of this user."""

    pid: int
    command: tuple[str, ...]
    environment: tuple[str, ...]  # NAME=VALUE

    @property
    def cluster(self) -> str:
        """The file of the cluster that it belongs to, "" if it belongs to none."""
        return self._option("--cluster")

    @property
    def name(self) -> str:
        """The name of this process of a cluster."""
        index = self._option("--process")
        return self._option("--name") or router_name(int(index) if index.isdecimal() else 0)

    @property
    def overrides(self) -> list[str]:
        """Overrides of its cluster file: the run directory of its environment, and the values of `--set`."""
        name = f"{RUN_DIR_VARIABLE}="
        given = [f"{RUN_DIR}={each.removeprefix(name)}" for each in self.environment if each.startswith(name)]
        return given + [value for option, value in itertools.pairwise(self.command) if option == "--set"]

    def _option(self, name: str) -> str:
        return next((value for option, value in itertools.pairwise(self.command) if option == name), "")


def read_process(pid: int) -> RunningProcess:
    """Read the command line and the environment of a process. Raises OSError if it is gone, or of another user."""
    command, environment = _texts(pid, "cmdline"), _texts(pid, "environ")
    return RunningProcess(pid, command or ("?",), environment)


def processes_of(file: Path, run_dir: str | None) -> dict[str, int]:
    """Return the names and pids of this user's processes of a cluster file, with their supervisor if one runs.

    A name has the lowest pid of its processes, which are the process itself and what it has forked.

    `run_dir`: what overrides process.run_dir for them; None: nothing.
    """
    found: dict[str, int] = {}
    for pid in sorted(int(each.name) for each in PROC.iterdir() if each.name.isdecimal()):
        try:
            process = read_process(pid)
            # Processes of another user may be read by root.
            if not process.cluster or (PROC / str(pid)).stat().st_uid != os.getuid():
                continue
            folder = Path(os.readlink(PROC / str(pid) / "cwd"))
        except OSError:
            continue
        ours = resolved_path(folder / process.cluster) == file and given_run_dir(process.overrides) == run_dir
        if ours and process.name not in found:
            found |= {process.name: pid, **_supervisor_of(pid)}
    return found


def _supervisor_of(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        status = (PROC / str(pid) / "status").read_text()
        parent = read_process(int(status.partition("PPid:")[2].split()[0]))
        if "deploy.cli" in parent.command:
            return {SUPERVISOR: parent.pid}
    return {}


def given_run_dir(overrides: list[str]) -> str | None:
    """Return the value that the last override of process.run_dir gives; None if there is none."""
    given = [value for key, _, value in (each.partition("=") for each in overrides) if key.strip() == RUN_DIR]
    return str(parse_scalar(given[-1])) if given else None


def _texts(pid: int, name: str) -> tuple[str, ...]:
    """Return the texts in a file of a process, each of which ends with a zero byte."""
    return tuple((PROC / str(pid) / name).read_bytes().decode(errors="replace").split("\0")[:-1])
