"""Parses the target of a command: a cluster file, or a model for which `deploy/up` writes a cluster file.

A model is a directory or a name on the Hugging Face hub; an existing path is never looked up on the hub. The cluster
file of a model has a fixed path, so that `deploy/status` and `deploy/down` find the cluster by the same target.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.model_directory import SNAPSHOTS
from common.checkpoint.model_mistakes import explain_directory, repository_name
from common.config.run_directory import BASE_REMEDY, runtime_base
from common.config.yaml_file import require_utf8
from common.errors import ConfigError
from deploy.hub import NAME

CLUSTERS = "models"  # folder of the cluster files that `deploy/up MODEL_DIR` writes
MODEL_FILES = (".json", ".safetensors")
TARGETS = (
    "a cluster file (deploy/clusters/example.yaml shows every key), a model directory, or a model of the Hugging Face "
    "hub as ORG/NAME"
)


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model to serve without a user-written cluster file."""

    text: str  # as the user gave it
    served_name: str
    identity: str  # distinguishes models with the same name
    directory: Path | None  # None: to be looked up on the hub

    @property
    def cluster_file(self) -> Path:
        """The path of its cluster file, whether or not it has been written. Raises ConfigError."""
        tag = hashlib.sha256(self.identity.encode()).hexdigest()[:8]
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", self.served_name).strip("-")[-40:] or "model"
        try:
            return runtime_base() / CLUSTERS / f"{stem}-{tag}.yaml"
        except OSError as error:
            raise ConfigError(
                "", f"cannot create {error.filename}: {error.strerror}; {BASE_REMEDY}"
            ) from error


def read_target(text: str, remedy: str = TARGETS) -> Path | ModelTarget:
    """Return the cluster file or the model that `text` names. Raises ConfigError, with `remedy`, if it is neither."""
    if "://" in text:
        raise ConfigError("", f"a URL names no cluster; use {remedy}; deploy/top shows a server by its URL")
    path = Path(os.path.expanduser(text))
    try:
        if path.is_dir():
            return _of_directory(text, path)
        if path.suffix in MODEL_FILES and (path.parent / "config.json").is_file():
            raise ConfigError("", f"this is a file of the model in {path.parent}: give that directory")
        if path.exists() or text.endswith((".yaml", ".yml")):
            return path
    except OSError as error:
        raise ConfigError("", f"cannot read {path}: {error.strerror or error}") from error
    if NAME.fullmatch(text):
        return ModelTarget(text, text, f"hub:{text}", None)
    raise ConfigError("", f"no such file or directory; use {remedy}")


def _of_directory(text: str, path: Path) -> ModelTarget:
    if not (path / "config.json").is_file():
        clusters = sorted(path.glob("*.yaml"))
        hint = f"; for a cluster file name the file, such as {clusters[0]}" if clusters else ""
        raise ConfigError("", f"the directory {explain_directory(path)}{hint}")
    absolute = Path(os.path.abspath(path))  # keeps the name of a symbolic link
    for each in (absolute, absolute.resolve()):
        require_utf8(each)
    return ModelTarget(text, _name_of(absolute), str(absolute.resolve()), absolute)


def _name_of(directory: Path) -> str:
    """Return the name of the directory; for a Hugging Face snapshot, whose directory is named by a hash, ORG/NAME."""
    if directory.parent.name == SNAPSHOTS:
        return repository_name(directory.parents[1]) or directory.name
    return directory.name or "model"
