"""Which streams of the target an EAGLE-3 head reads.

Heads name layers, and do not always say whether they mean what enters a layer or what it gives. Trained on one and fed
the other, a head starts, and is hardly ever right: https://github.com/vllm-project/vllm/pull/50170.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.checkpoint.json_fields import flag, optional_section, positive, shown
from common.errors import ModelError

KEY = "aux_layer_convention"  # of the head's config.json
IDS = "eagle_aux_hidden_state_layer_ids"

Convention = Literal["boundary", "output"]
Source = Literal["stated", "guessed", "default"]


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """The layers that one draft head reads. Empty: it reads the target's normed output."""

    boundaries: tuple[int, ...] = ()  # i: the stream entering layer i, and after the last layer their number
    convention: Convention = "boundary"  # what the file's ids name
    # Stated by the file, or guessed by its first id; default: it names no layers, and EAGLE's own are taken.
    source: Source = "stated"

    def describe(self) -> dict[str, str]:
        """For the log and /server_info."""
        if not self.boundaries:
            return {}
        return {
            "aux_layers": ", ".join(map(str, self.boundaries)),
            "aux_layer_convention": self.convention,
            "aux_layer_source": self.source,
        }


def aux_layers(raw: Mapping[str, Any], num_layers: int, where: str) -> AuxLayers:
    """As `raw`, a head's config.json, has them for a target of so many layers. `ModelError` names `where`.

    Row D4: aux states are used unless the file says no.
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
            f"{where}: aux layers {list(boundaries)} are no ascending boundaries of {num_layers} layers"
        )
    return AuxLayers(boundaries, convention, stated if named else "default")


def _convention(raw: Mapping[str, Any], ids: list[int], where: str) -> tuple[Convention, Source]:
    """Heads whose ids begin with 1 mean outputs: nobody reads what enters the second layer."""
    given = raw.get(KEY, "auto")
    if given == "boundary" or given == "output":
        return given, "stated"
    if given != "auto":
        raise ModelError(f"{where}: {KEY} is {shown(given)}; it is boundary, output or auto")
    return ("output" if ids[0] == 1 else "boundary"), "guessed"
