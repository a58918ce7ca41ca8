"""Determines which streams of the target an EAGLE-3 head reads.

Heads name layers, but do not always say whether they mean a layer's input or its output. A head that was trained on
one and gets the other starts without an error, and its drafts are hardly ever right:
https://github.com/vllm-project/vllm/pull/50170.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.checkpoint.json_fields import Raw, flag, optional_section, positive, shown
from common.errors import ModelError

KEY = "aux_layer_convention"  # in the head's config.json
IDS = "eagle_aux_hidden_state_layer_ids"

Convention = Literal["boundary", "output"]
Source = Literal["stated", "guessed", "default"]


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """The layers that one draft head reads. Empty if it reads the target's normed output."""

    # Boundary i is the stream that enters layer i; num_layers is the stream after the last layer.
    boundaries: tuple[int, ...] = ()
    convention: Convention = "boundary"  # the meaning of the file's ids
    # Stated by the file or guessed from its first id; default: the file names no layers, and EAGLE's own are used.
    source: Source = "stated"

    def describe(self) -> dict[str, str]:
        """Return the fields for the log and /server_info."""
        if not self.boundaries:
            return {}
        return {
            "aux_layers": ", ".join(map(str, self.boundaries)),
            "aux_layer_convention": self.convention,
            "aux_layer_source": self.source,
        }


def aux_layers(raw: Raw, num_layers: int, where: str) -> AuxLayers:
    """Read `raw`, a head's config.json, for a target of this many layers. Raises ModelError that begins with `where`.

    Aux states are used unless the file turns them off.
    """
    section = optional_section(raw, "eagle_config", where)
    if not flag(section, "use_aux_hidden_state", where, True):
        return AuxLayers()
    named = section.get(IDS) or raw.get(IDS)
    ids = named or [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or len(ids) > num_layers + 1 or not all(type(each) is int for each in ids):
        raise ModelError(f"{where}: {IDS} must be a list of layers of the target, found {shown(ids)}")
    key = "num_aux_hidden_states"
    count = positive(raw if raw.get(key) else section, key, where, len(ids))
    if count != len(ids):
        raise ModelError(
            f"{where}: num_aux_hidden_states is {count}, but the aux layers are {list(ids)}; name them in "
            f"eagle_config.{IDS}"
        )
    convention, stated = _convention(raw, ids, where)
    boundaries = tuple(layer + 1 for layer in ids) if convention == "output" else tuple(ids)
    if list(boundaries) != sorted(set(boundaries)) or not all(0 <= each <= num_layers for each in boundaries):
        raise ModelError(
            f"{where}: aux layers {list(boundaries)} are not ascending boundaries of {num_layers} layers"
        )
    return AuxLayers(boundaries, convention, stated if named else "default")


def _convention(raw: Raw, ids: list[int], where: str) -> tuple[Convention, Source]:
    """Return the convention.

    Heads whose ids begin with 1 mean outputs: no head reads the input of the second layer.
    """
    given = raw.get(KEY, "auto")
    if given == "boundary" or given == "output":
        return given, "stated"
    if given != "auto":
        raise ModelError(f"{where}: {KEY} is {shown(given)}; it is boundary, output or auto")
    return ("output" if ids[0] == 1 else "boundary"), "guessed"
