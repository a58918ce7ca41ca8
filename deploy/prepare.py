"""Resolves the target of a command to a cluster file, which is written first if the target is a model."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from common.checkpoint.chat_template_file import find_chat_template
from common.config import load_cluster
from common.config.run_directory import KEY as RUN_DIR
from common.config.run_directory import run_directory
from common.errors import ConfigError, ModelError
from common.speculation.directory import algorithm_of
from deploy.cluster_options import down_line
from deploy.gpus import driver_present, find_gpus
from deploy.hub import Say, find_snapshot
from deploy.own_model import Machine, cluster_sections, lock_path, write_cluster_file
from deploy.process_table import read_table
from deploy.supervisor import AlreadyRunning
from deploy.targets import ModelTarget, read_target

DRAFTS = "the directory of a draft model, or ORG/NAME"
MAX_RUN_DIR = 4096  # bytes of the text of process.run_dir in a lock file; no path is longer


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The cluster file to start. If it was written for a model, nobody else writes it within this context.

    A process that inherits `lock` keeps it locked until it ends.
    """

    path: Path
    lock: int | None = None  # descriptor; None: the user's own file, or that of a running cluster

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lock is not None:
            os.close(self.lock)


def cluster_file_of(text: str) -> Path:
    """Return the cluster file of a target; for a model it may not exist yet. Raises ConfigError."""
    target = read_target(text)
    return target.cluster_file if isinstance(target, ModelTarget) else target


def prepare(
    text: str, draft: str | None, revision: str | None, overrides: Sequence[str], say: Say
) -> ClusterFile:
    """Return the cluster file to start. For a model, download it if needed and write the file.

    Raises ConfigError, or AlreadyRunning if a cluster of this model runs with another run directory, or is being
    started or stopped: its processes read the file when they start.
    """
    target = read_target(text)
    if not isinstance(target, ModelTarget):
        for option, value, key in (
            ("--draft", draft, "speculation.draft_model_path"),
            ("--revision", revision, "model.path"),
        ):
            if value is not None:
                raise ConfigError("", f"{option} applies only to a model; in a cluster file, set {key}")
        return ClusterFile(target)
    if target.directory is not None and revision is not None:
        raise ConfigError("", "--revision applies only to ORG/NAME; this is a directory")
    file = target.cluster_file
    if _is_running(file, overrides):
        return ClusterFile(file)  # its processes may read it again: leave it unchanged
    lock = _lock(file)
    try:
        _write(target, draft, revision, say)
        _note_run_directory(lock, file, overrides)
    except BaseException:
        os.close(lock)
        raise
    return ClusterFile(file, lock)


def _write(target: ModelTarget, draft: str | None, revision: str | None, say: Say) -> None:
    """Write the cluster file of a model. Raises ConfigError."""
    directory = target.directory or find_snapshot(target.text, revision, say)
    draft_directory = None if draft is None else _find_draft(draft, directory, say)
    gpus = find_gpus()
    if not gpus and driver_present():
        say(
            "there is an NVIDIA GPU, but this torch cannot use it: serving on the CPU (see deploy/setup --help)"
        )
    if find_chat_template(directory) is None:
        say(
            f"{directory} has no chat template: only /v1/completions is served; set model.chat_template to add one"
        )
    machine = Machine.of_this_host(gpus)
    sections = cluster_sections(target.served_name, directory, draft_directory, machine)
    write_cluster_file(target.cluster_file, target.served_name, sections)
    speculation = sections.get("speculation", {})
    drafted = (
        f" with {speculation['algorithm']} drafts of {speculation['draft_model_path']}" if speculation else ""
    )
    say(f"serving {target.served_name}{drafted} on {machine}; cluster file: {target.cluster_file}")


def _lock(file: Path) -> int:
    """Lock the cluster file of a model and return the descriptor that holds the lock."""
    path = lock_path(file)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("", f"cannot write {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What is left in it is the run directory of an earlier cluster.
        os.ftruncate(descriptor, 0)
    except BlockingIOError:
        refusal = _locked(file, os.pread(descriptor, MAX_RUN_DIR, 0).decode(errors="surrogateescape"))
        os.close(descriptor)
        raise refusal from None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError("", f"cannot lock {path}: {error.strerror or error}") from error
    return descriptor


def _note_run_directory(lock: int, file: Path, overrides: Sequence[str]) -> None:
    """Write the value of process.run_dir into the lock file. By it others find the cluster that keeps the lock."""
    value = load_cluster(file, overrides).cluster.process.run_dir
    try:
        os.pwrite(lock, value.encode(errors="surrogateescape"), 0)
    except OSError as error:
        raise ConfigError("", f"cannot write {lock_path(file)}: {error.strerror or error}") from error


def _locked(file: Path, run_dir: str) -> AlreadyRunning:
    """Return the refusal of a start. `run_dir`: of the cluster that keeps the lock; "" until its file is written."""
    if not run_dir:
        return AlreadyRunning(
            f"another deploy/up prepares {file}; wait until its cluster has started, or end it with Ctrl-C in its "
            "terminal"
        )
    try:
        here = load_cluster(file).cluster.process.run_dir
    except ConfigError:
        here = ""
    down = down_line(file, [] if run_dir == here else [f"{RUN_DIR}={run_dir}"])
    return AlreadyRunning(
        f"another deploy/up has written {file} and starts, runs or stops a cluster with it; stop that one with {down}, "
        "or copy the file, change the copy and run deploy/up COPY"
    )


def _find_draft(text: str, target: Path, say: Say) -> Path:
    try:
        found = read_target(text, DRAFTS)
        if isinstance(found, Path):
            raise ConfigError("", f"{text} is a file")
        if found.directory is not None:
            return found.directory
        return find_snapshot(text, None, say, lambda directory: algorithm_of(directory, target))
    except (ConfigError, ModelError) as error:
        problem = str(error)
        remedy = "" if problem.endswith(DRAFTS) else f"; use {DRAFTS}"
        raise ConfigError("--draft", problem + remedy) from error


def _is_running(file: Path, overrides: Sequence[str]) -> bool:
    """Return whether a supervisor is running the cluster of a file that was written earlier."""
    try:
        return file.exists() and read_table(run_directory(load_cluster(file, overrides))) is not None
    except ConfigError:
        return False
