"""The record that describes a speculative algorithm to all code that does not run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig

Json = Mapping[str, Any]


def no_other_form(name: str, raw: Json) -> bool:
    """Return False, the default of `fits`: only `architectures` tells what a draft is."""
    return False


def no_tensors(names: Collection[str]) -> bool:
    """Return False, the default of `holds`: tensors do not tell what a draft is."""
    return False


def any_steps(raw: Json, file: Path) -> int | None:
    """Return None, the default of `max_steps`: a draft that runs again for every step makes any number of steps."""
    return None


def no_comparison(draft: Path, target: Path) -> None:
    """No-op, the default of `compare`: `read` has compared everything."""


def as_it_is(raw: Json, where: str) -> Json:
    """Return config.json unchanged, the default of `flatten`: its keys are at the top level."""
    return raw


def window_slots(steps: int, topk: int, nodes: int) -> int:
    """Return the default of `slots`: the widest forward is the tree, or all levels of it that the draft has grown."""
    return max(nodes, (steps - 1) * topk)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDirectory:
    """Describes how the directory of an algorithm's draft model is read."""

    # Architectures in config.json of a draft of this algorithm.
    architectures: Collection[str]
    # Builds the draft config from config.json (keys, its path) and the target. Raises ModelError if it does not fit.
    read: Callable[[Json, Path, ModelConfig], DraftConfig]
    # "module:function" from DraftParts to LoadedDraft (common/node/loaded_draft.py), imported when the draft is
    # loaded.
    model: str
    # Whether a config.json with another architecture, or with these keys, is a draft of this algorithm too.
    fits: Callable[[str, Json], bool] = no_other_form
    # Whether tensors of these names, without `model.` before them, are a draft of this algorithm, whatever config.json
    # calls it: many heads have the architecture of their target.
    holds: Callable[[Collection[str]], bool] = no_tensors
    # Moves nested keys of config.json to the top level; called with (keys, where) of any draft.
    flatten: Callable[[Json, str], Json] = as_it_is
    # The maximum steps of a draft with this config.json (keys, its path); None: any number. Raises ModelError.
    max_steps: Callable[[Json, Path], int | None] = any_steps
    # Compares the directories of draft and target, before either is loaded. Raises ModelError.
    compare: Callable[[Path, Path], None] = no_comparison
    # The draft reads embeddings, so it supports targets that read images.
    takes_embeds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One speculative algorithm."""

    name: str
    # Names of other servers for it: a config that uses one is refused with a hint to `name`.
    other_names: tuple[str, ...] = ()
    # False for plain decoding.
    drafts: bool = True
    # None if it has no draft model.
    directory: DraftDirectory | None = None
    # Whether it can grow trees (speculation.topk > 1).
    trees: bool = False
    # Whether the length of its chains can change (speculation.adaptive).
    adaptive: bool = False
    # Slots per request that the widest forward of a round takes, by (steps, topk, nodes).
    slots: Callable[[int, int, int], int] = window_slots
