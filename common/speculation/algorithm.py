"""What a speculative algorithm is to everything outside the code that runs it: one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig

Json = Mapping[str, Any]


def no_other_form(name: str, raw: Json) -> bool:
    """`fits` of an algorithm whose drafts are told by `architectures`."""
    return False


def any_steps(raw: Json, where: str) -> int | None:
    """`most_steps` of an algorithm whose draft runs again for every step."""
    return None


def as_it_is(raw: Json, where: str) -> Json:
    """`flatten` of an algorithm whose config.json has its keys at the top."""
    return raw


def window_slots(steps: int, topk: int, nodes: int) -> int:
    """`slots` of an algorithm whose widest forward is the tree, or all levels of it that the draft has grown."""
    return max(nodes, (steps - 1) * topk)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDirectory:
    """How the directory of an algorithm's draft model is read."""

    # What config.json calls a draft of this algorithm.
    architectures: tuple[str, ...]
    # From config.json (keys, its path) and the target to the draft. Raises ModelError where it does not fit.
    read: Callable[[Json, Path, ModelConfig], DraftConfig]
    # "module:function" from DraftParts to LoadedDraft (common/node/loaded_draft.py), imported when it is loaded.
    model: str
    # Whether config.json with another architecture, or these keys, is a draft of this algorithm, too.
    fits: Callable[[str, Json], bool] = no_other_form
    # The same keys at the top, from a form of config.json that nests them; (keys, where) of any draft are given.
    flatten: Callable[[Json, str], Json] = as_it_is
    # The steps that a draft with these keys can take at most; None: any number.
    most_steps: Callable[[Json, str], int | None] = any_steps
    # The draft reads embeddings, so it can follow a target that reads images.
    takes_embeds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One speculative algorithm."""

    name: str
    # Words of other servers for it: a config that has one is answered with `name`.
    other_names: tuple[str, ...] = ()
    # False: plain decoding.
    drafts: bool = True
    # None: it has no draft model.
    directory: DraftDirectory | None = None
    # It can grow trees (speculation.topk > 1).
    trees: bool = False
    # Its chains can change their length (speculation.adaptive).
    adaptive: bool = False
    # Slots of a request that the widest forward of a round takes, by (steps, topk, nodes).
    slots: Callable[[int, int, int], int] = window_slots
