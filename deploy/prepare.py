"""Resolves the target of a command to a cluster file, which is written first if the target is a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.checkpoint.chat_template_file import find_chat_template
from common.config import load_cluster
from common.config.run_directory import run_directory
from common.errors import ConfigError, ModelError
from common.speculation.directory import algorithm_of
from deploy.gpus import driver_present, find_gpus
from deploy.hub import Say, find_snapshot
from deploy.own_model import Machine, cluster_sections, write_cluster_file
from deploy.process_table import read_table
from deploy.targets import ModelTarget, read_target

DRAFTS = "the directory of a draft model, or ORG/NAME"


def cluster_file_of(text: str) -> Path:
    """Return the cluster file of a target; for a model it may not exist yet. Raises ConfigError."""
    target = read_target(text)
    return target.cluster_file if isinstance(target, ModelTarget) else target


def prepare(text: str, draft: str | None, revision: str | None, overrides: Sequence[str], say: Say) -> Path:
    """Return the cluster file to start. For a model, download it if needed and write the file. Raises ConfigError."""
    target = read_target(text)
    if not isinstance(target, ModelTarget):
        for option, value, key in (
            ("--draft", draft, "speculation.draft_model_path"),
            ("--revision", revision, "model.path"),
        ):
            if value is not None:
                raise ConfigError("", f"{option} applies only to a model; in a cluster file, set {key}")
        return target
    if target.directory is not None and revision is not None:
        raise ConfigError("", "--revision applies only to ORG/NAME; this is a directory")
    file = target.cluster_file
    if _is_running(file, overrides):
        return file  # its processes may read it again: leave it unchanged
    directory = target.directory or find_snapshot(target.text, revision, say).directory
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
    write_cluster_file(
        file, target.served_name, cluster_sections(target.served_name, directory, draft_directory, machine)
    )
    say(f"serving {target.served_name} on {machine}; cluster file: {file}")
    return file


def _find_draft(text: str, target: Path, say: Say) -> Path:
    try:
        found = read_target(text, DRAFTS)
        if isinstance(found, Path):
            raise ConfigError("", f"{text} is a file")
        if found.directory is not None:
            return found.directory
        return find_snapshot(text, None, say, lambda directory: algorithm_of(directory, target)).directory
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
