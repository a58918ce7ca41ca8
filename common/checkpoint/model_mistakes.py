"""Recognises what is commonly given instead of a model directory, and says what to give. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from common.checkpoint.model_directory import FETCH_LFS, LFS_POINTER, SNAPSHOTS

REPOSITORY = "models--"  # prefix of folders of a Hugging Face cache: models--ORG--NAME
MAX_SHOWN = 4  # names in one sentence


def explain_directory(directory: Path) -> str:
    """Return why a directory without config.json is not a model directory, as a clause that follows its path."""
    names = _names(directory)
    if not names:
        return "is empty; give a directory with config.json, tokenizer.json and safetensors files"
    if "adapter_config.json" in names:
        return (
            "contains an adapter (adapter_config.json), and adapters are not served: merge it into its base model "
            "(peft: merge_and_unload, then save_pretrained) and give that directory"
        )
    if directory.name == "hub" or any(name.startswith(REPOSITORY) for name in names):
        return f"is the root of a Hugging Face cache; {_of_cache(names)}"
    if "hub" in names and any(each.startswith(REPOSITORY) for each in _names(directory / "hub")):
        return f"is the home of a Hugging Face cache; {_of_cache(_names(directory / 'hub'))}"
    if directory.name.startswith(REPOSITORY):
        return f"is the cache folder of one model; {_of_repository(directory)}"
    if directory.name == SNAPSHOTS and directory.parent.name.startswith(REPOSITORY):
        return f"contains the revisions of one model; {_of_repository(directory.parent)}"
    gguf = _ending(names, ".gguf")
    if gguf:
        return (
            f"contains GGUF files ({_shown(gguf)}), which are not read: download the model's safetensors, or convert "
            "them with transformers (from_pretrained with gguf_file, then save_pretrained)"
        )
    if "params.json" in names or _ending(names, ".pth"):
        return (
            "has no config.json; it looks like a checkpoint in its maker's own format: use the model's Hugging Face "
            "form, which has config.json and model.safetensors"
        )
    return f"has no config.json, so it is not a model directory; it contains {_shown(names)}"


def explain_missing(path: Path) -> str:
    """Return why a path is no directory, as a clause that follows it."""
    if os.path.lexists(path):
        return "is a file: give the directory that contains it"
    return "does not exist: correct the path"


def explain_weight_file(start: bytes) -> str | None:
    """Return what a file is that begins with `start` and is not a safetensors file; None if unknown."""
    if start.startswith(LFS_POINTER):
        return FETCH_LFS
    if start.startswith(b"GGUF"):
        return "is a GGUF file, which is not read; use the model's safetensors"
    if start.startswith(b"PK\x03\x04"):
        return "is a PyTorch (zip) file, not safetensors; convert it with transformers' save_pretrained"
    return None


def repository_name(folder: Path) -> str | None:
    """Return ORG/NAME of a cache folder models--ORG--NAME; None for other folders."""
    if not folder.name.startswith(REPOSITORY):
        return None
    return folder.name.removeprefix(REPOSITORY).replace("--", "/")


def _of_cache(names: Iterable[str]) -> str:
    found = [name for each in names if (name := repository_name(Path(each))) is not None]
    if not found:
        return "no model is in it; give a model directory, or deploy/up ORG/NAME to download one"
    return f"name one of its models, as in deploy/up {found[0]} (found: {_shown(found)})"


def _of_repository(folder: Path) -> str:
    name = repository_name(folder)
    revisions = [folder / SNAPSHOTS / each for each in _names(folder / SNAPSHOTS)]
    if not revisions:
        return f"no revision is in it; run deploy/up {name} to download it"
    return f"run deploy/up {name}, or give a revision's directory, such as {revisions[0]}"


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError:
        return []


def _ending(names: Iterable[str], suffix: str) -> list[str]:
    return [name for name in names if name.endswith(suffix)]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(name[:80] for name in names[:MAX_SHOWN]) + more
