"""Refuses the start of a cluster whose model or draft model this host does not have.

Each process would find that out by itself, but only after it has imported torch, and after others have loaded for a
while. What a directory contains is left to them.
"""

from __future__ import annotations

import stat
from pathlib import Path

from common.checkpoint.model_mistakes import explain_missing
from common.config import Resolved
from common.errors import ConfigError
from deploy.hub import NAME


def check_model_directories(resolved: Resolved) -> None:
    """Raise ConfigError for the first directory that does not exist. All processes run on this host."""
    section = resolved.cluster.speculation
    for key, text, path in (
        ("model.path", resolved.cluster.model.path, resolved.model_path),
        ("speculation.draft_model_path", section.draft_model_path, resolved.draft_path),
    ):
        if text is not None and path is not None:
            _check(key, text, path)


def _check(key: str, text: str, path: Path) -> None:
    """Check one directory. `text` is the value of the key, and `path` the path that it stands for."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            key, f"cannot read {path}: {reason}; correct the path, or make it readable"
        ) from error
    problem = explain_missing(path)
    if NAME.fullmatch(text) and not path.exists():
        download = f"hf download {text} --local-dir DIR"
        problem += f", or for the model {text} of the Hugging Face hub run `{download}` and write DIR"
    raise ConfigError(key, f"{path} {problem}")
