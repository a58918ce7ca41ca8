"""Finds a model of the Hugging Face hub: in the local cache, or by a download with a progress bar.

Only what a node reads is fetched: JSON, tokenizer and template files first, then, if the architecture is supported, the
safetensors files that the index names. huggingface_hub reads the token (HF_TOKEN, or `hf auth login`); no message
contains it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import INDEX, SINGLE, indexed_names, weight_paths
from common.errors import ConfigError, ModelError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
SMALL_FILES = ("*.json", "*.jinja", "tokenizer*")
NESTED = "*/*"  # folders such as original/ and onnx/ hold the same weights in other formats
Say = Callable[[str], None]
Check = Callable[[Path], object]


def find_snapshot(name: str, revision: str | None, say: Say, check: Check = ModelConfig.load) -> Path:
    """Return the directory of the model ORG/NAME at a branch, tag or commit, by default `main`; its name is the commit.

    Raises ConfigError with the remedy.

    Args:
        check: receives a directory without weights and raises ModelError if the model is not supported.
    """
    cached = _cached(name, revision)
    if cached is not None and _is_whole(cached):
        say(f"{name}: commit {cached.name}, from the cache ({cached})")
        return cached
    found = _download(name, revision, say, check)
    say(f"{name}: commit {found.name} ({found})")
    return found


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        file = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        raise ConfigError("", f"the hub has no such names: {error}") from error
    return Path(file).parent if isinstance(file, str) else None


def _is_whole(directory: Path) -> bool:
    """Return whether the directory has every file that a node reads; false after an interrupted download."""
    try:
        return bool(weight_paths(directory)) and (directory / "tokenizer.json").is_file()
    except ModelError:
        return False


def _download(name: str, revision: str | None, say: Say, check: Check) -> Path:
    try:
        directory = _fetch(name, revision, SMALL_FILES)
        check(directory)
        if not _is_whole(directory):
            free = shutil.disk_usage(directory).free / (1 << 30)
            say(f"{name}: downloading to {constants.HF_HUB_CACHE} ({free:.0f} GiB free)")
            # By commit: `main` may move between the two downloads.
            _fetch(name, directory.name, _weight_names(directory))
            weight_paths(directory)
    except ModelError as error:
        raise ConfigError("", str(error)) from error
    except Exception as error:  # the library's HTTP client and its file locks raise their own types
        raise ConfigError("", _explain(name, revision, error)) from error
    return directory


def _fetch(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    return Path(
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=[NESTED]
        )
    )


def _weight_names(directory: Path) -> tuple[str, ...]:
    index = directory / INDEX
    return tuple(indexed_names(index)) if index.is_file() else (SINGLE,)


def _explain(name: str, revision: str | None, error: Exception) -> str:
    """Describe an error in one sentence, with the remedy."""
    endpoint = constants.ENDPOINT.rpartition("@")[2]  # the URL may contain a password
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its terms at {endpoint}/{name}, then {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: use a branch, a tag or a full commit hash"
    if isinstance(error, RepositoryNotFoundError):
        return f"{endpoint} has no model {name}, or it is private: check the name; for a private one {login}"
    if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
        at = "" if revision is None else f" --revision {revision}"
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{endpoint} cannot be reached"
        return (
            f"{name} is missing or incomplete in the cache ({constants.HF_HUB_CACHE}), and {reason}. On a machine with "
            f"network run `hf download {name}{at} --local-dir DIR`, copy DIR here, and run deploy/up DIR"
        )
    return (
        f"{name} cannot be downloaded from {endpoint}: {_without_token(str(error)) or type(error).__name__}"
    )


def _without_token(text: str) -> str:
    for secret in (huggingface_hub.get_token(), os.environ.get("HF_TOKEN")):
        text = text.replace(secret, "(token)") if secret else text
    return " ".join(text.split())[:600]
