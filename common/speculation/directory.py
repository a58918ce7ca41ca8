"""Reads the directory of a draft model: detects its algorithm, and builds the algorithm's config from it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from common.checkpoint import model_files
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.json_fields import architecture_of
from common.checkpoint.model_config import ModelConfig
from common.errors import ModelError
from common.speculation.algorithm import DraftDirectory, Json
from common.speculation.head_tensors import check_form, names_if_present, tensor_names
from common.speculation.table import algorithm, algorithms


def load_draft_config(path: str | Path, name: str, target: ModelConfig) -> DraftConfig:
    """Return the draft config at `path` for the algorithm `name`.

    Raises ModelError if it fits neither it nor the target.
    """
    file, raw = _read(path)
    chosen = algorithm(name).directory
    assert chosen is not None, f"{name} has no draft model"
    names = tensor_names(file.parent)
    check_form(raw, names, str(file))
    _check_architecture(raw, names, name, str(file))
    return chosen.read(raw, file, target)


def compare_with_target(path: Path, name: str, target: Path) -> None:
    """Compare the draft at `path` for the algorithm `name` with its target's directory. Raises ModelError."""
    directory = algorithm(name).directory
    assert directory is not None, f"{name} has no draft model"
    directory.compare(path, target)


def algorithm_of(path: str | Path, target: str | Path) -> str:
    """Return the algorithm that drafts with the model in `path`. Raises ModelError.

    It is judged by its config.json and, where the weights are there already, by the names of its tensors. A model that
    could be served by itself drafts standalone, even if its checkpoint contains prediction modules, unless it is the
    target itself: then its modules draft.
    """
    file, raw = _read(path)
    names = names_if_present(file.parent)
    check_form(raw, names, str(file))
    keys = raw if Path(path).resolve() == Path(target).resolve() else {}
    found = _algorithms_of(raw, keys, names)
    if not found:
        raise ModelError(
            f"{file}: architecture {str(architecture_of(raw))[:80]} is not a draft; known are {_known()}"
        )
    return found[0]


def max_steps(path: str | Path, name: str) -> int | None:
    """Return the maximum steps of the draft at `path`; None: any number. Raises ModelError."""
    file, raw = _read(path)
    directory = algorithm(name).directory
    return None if directory is None else directory.max_steps(raw, file)


def _read(path: str | Path) -> tuple[Path, Json]:
    file = Path(path) / "config.json"
    raw: Json = model_files.read_json(file)
    check_form(raw, (), str(file))
    for _, directory in _directories():
        raw = directory.flatten(raw, str(file))
    return file, raw


def _directories() -> list[tuple[str, DraftDirectory]]:
    return [(each.name, each.directory) for each in algorithms() if each.directory is not None]


def _algorithms_of(raw: Json, keys: Json, names: Collection[str]) -> list[str]:
    """Return the algorithms whose draft this is. Tensors of a head decide; otherwise its architecture and `keys`."""
    held = [name for name, each in _directories() if each.holds(names)]
    return held or [name for name, each in _directories() if _is_of(architecture_of(raw), keys, each)]


def _check_architecture(raw: Json, names: Collection[str], name: str, where: str) -> None:
    if name in _algorithms_of(raw, raw, names):
        return
    found = architecture_of(raw)
    others = _algorithms_of(raw, {}, names)
    remedy = f"set speculation.algorithm to {others[0]}" if others else f"known are {_known()}"
    raise ModelError(f"{where}: architecture {str(found)[:80]} is not a draft for {name}; {remedy}")


def _known() -> str:
    return ", ".join(known for _, each in _directories() for known in each.architectures)


def _is_of(found: object, raw: Json, directory: DraftDirectory) -> bool:
    return isinstance(found, str) and (found in directory.architectures or directory.fits(found, raw))
