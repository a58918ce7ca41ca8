"""Finds the running cluster of a file: by its run directory alone if the file is no longer valid."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config import load_cluster
from common.config.router_processes import names_router
from common.config.run_directory import ADMIN, existing_run_directory, own_socket_in, run_directory
from common.config.run_directory import KEY as RUN_DIR
from common.config.yaml_file import read_mapping
from common.errors import ConfigError
from common.launch_record import LaunchRecord, launched
from common.resolved_path import resolved_path
from deploy.cluster_options import RUN_DIR_VARIABLE
from deploy.other_cluster import other_cluster
from deploy.process_table import Table, read_table, table_path
from deploy.router_states import sockets_of
from deploy.running_processes import given_run_dir, processes_of

TABLE_SECONDS = 3.0  # within which a supervisor has written its table again if somebody has removed it
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """The running processes of a cluster file, as its run directory records them."""

    file: Path
    run_dir: Path
    table: Table | None  # of a living supervisor
    launched: tuple[tuple[str, LaunchRecord], ...]  # processes without a supervisor
    sockets: tuple[Path, ...]  # at which routers of this host answer, the admin socket first
    notice: str = ""  # what the user has to know about the file or the run directory
    # Name -> pid of processes that run although the run directory has no record of any.
    unrecorded: Mapping[str, int] = field(default_factory=dict)

    @property
    def admin_socket(self) -> Path:
        return self.sockets[0]


def find_cluster(file: Path, overrides: Sequence[str]) -> FoundCluster:
    """Return what runs of a cluster file. Raises ConfigError if the file is not valid and nothing of it is found."""
    try:
        resolved = load_cluster(file, overrides)
    except ConfigError as error:
        found = None if _is_valid(file) else _recorded(resolved_path(file), overrides, str(error))
        if found is None:
            raise
        return found
    run_dir = run_directory(resolved)
    table, processes = read_table(run_dir), tuple(launched(run_dir))
    unrecorded, notice = dict[str, int](), ""
    if table is None and not processes and not table_path(run_dir).exists():
        unrecorded = processes_of(resolved.file, _override(overrides, os.environ))
        if unrecorded and (table := _rewritten_table(run_dir)):
            unrecorded = {}
            notice = f"{run_dir} was removed while the cluster ran; until a restart its routers cannot be asked there"
    return FoundCluster(
        file=resolved.file,
        run_dir=run_dir,
        table=table,
        launched=processes,
        sockets=sockets_of(resolved),
        notice=notice,
        unrecorded=unrecorded,
    )


def _rewritten_table(run_dir: Path) -> Table | None:
    deadline = time.monotonic() + TABLE_SECONDS
    while (table := read_table(run_dir)) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return table


def _is_valid(file: Path) -> bool:
    """Return whether the file by itself is valid: then an override or a variable is not."""
    try:
        load_cluster(file, (), {})
    except ConfigError:
        return False
    return True


def _recorded(file: Path, overrides: Sequence[str], problem: str) -> FoundCluster | None:
    for configured in _run_directories(file, overrides, os.environ):
        run_dir = existing_run_directory(configured, file)
        if run_dir is None:
            continue
        table, processes = read_table(run_dir), launched(run_dir)
        if other_cluster(table, file, overrides) or not (table or processes):
            continue
        names = (*(table.processes if table else ()), *(name for name, _ in processes))
        recorded = (table.admin_socket if table else "", *(each.admin_socket for _, each in processes))
        admin = next((Path(socket) for socket in recorded if socket), run_dir / f"{ADMIN}.sock")
        return FoundCluster(
            file=file,
            run_dir=run_dir,
            table=table,
            launched=tuple(processes),
            sockets=(admin, *(own_socket_in(run_dir, name) for name in names if names_router(name))),
            notice=f"{file} is no longer valid, so none of its processes can start again: {problem}",
        )
    return None


def _run_directories(file: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what process.run_dir may have been at the start of the cluster, the likeliest value first."""
    if (given := _override(overrides, environ)) is not None:
        yield given
        return
    try:
        section = read_mapping(file).get("process")
    except ConfigError:
        section = None
    if isinstance(section, dict) and isinstance(section.get("run_dir"), str):
        yield section["run_dir"]
    yield "auto"


def _override(overrides: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the value of process.run_dir that goes before that of the file; None if there is none."""
    variable = [f"{RUN_DIR}={environ[RUN_DIR_VARIABLE]}"] if RUN_DIR_VARIABLE in environ else []
    return given_run_dir([*variable, *overrides])
