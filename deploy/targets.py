"""What a command is about: a cluster file, or a model that `deploy/up` writes a cluster file for.

A model is a directory or the name of one on the Hugging Face hub; a path that exists is never looked up there. Its
cluster file has a fixed place, so that `deploy/status` and `deploy/down` find the cluster by the same words.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.model_directory import SNAPSHOTS
from common.checkpoint.model_mistakes import explain_directory, repository_name
from common.config.run_directory import runtime_base
from common.errors import ConfigError
from deploy.hub import NAME

CLUSTERS = "models"  # folder of the cluster files that `deploy/up MODEL_DIR` writes


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model to serve without a cluster file of one's own."""

    text: str  # as it was given
    served_name: str
    identity: str  # tells models of equal names apart
    directory: Path | None  # None: to be looked up on the hub

    @property
    def cluster_file(self) -> Path:
        """Where its cluster file lies, whether or not it has been written. Raises ConfigError."""
        tag = hashlib.sha256(self.identity.encode()).hexdigest()[:8]
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", self.served_name).strip("-")[-40:] or "model"
        try:
            return runtime_base() / CLUSTERS / f"{stem}-{tag}.yaml"
        except OSError as error:
            raise ConfigError("", f"cannot make {error.filename}: {error.strerror}") from error


def read_target(text: str) -> Path | ModelTarget:
    """The cluster file or the model that is meant. Raises ConfigError for what is neither."""
    path = Path(text).expanduser()
    if path.is_dir():
        return _of_directory(text, path)
    if path.exists() or text.endswith((".yaml", ".yml")):
        return path
    if NAME.fullmatch(text):
        return ModelTarget(text, text, f"hub:{text}", None)
    raise ConfigError(
        "",
        "there is no such file or directory; give a cluster file (deploy/clusters/example.yaml shows every key), a "
        "model directory, or a model of the Hugging Face hub as ORG/NAME",
    )


def _of_directory(text: str, path: Path) -> ModelTarget:
    if not (path / "config.json").is_file():
        clusters = sorted(path.glob("*.yaml"))
        hint = f"; for a cluster file give the file, as {clusters[0]}" if clusters else ""
        raise ConfigError("", f"the directory {explain_directory(path)}{hint}")
    absolute = Path(os.path.abspath(path))  # keeps the name of a link
    return ModelTarget(text, _name_of(absolute), str(absolute.resolve()), absolute)


def _name_of(directory: Path) -> str:
    """The directory's name; for a snapshot of a Hugging Face cache, whose name is a hash, ORG/NAME."""
    if directory.parent.name == SNAPSHOTS:
        return repository_name(directory.parents[1]) or directory.name
    return directory.name or "model"
