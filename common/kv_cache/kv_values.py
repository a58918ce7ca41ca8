"""The dtype and the scales of stored keys and values: those of the model, or eight bits with constant scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common.kv_cache.plane import Kept, Plane

FP8: Final = "float8_e4m3fn"
ATTENTION_PLANES: Final = ("k", "v")


@dataclass(frozen=True, slots=True)
class KvValues:
    """The dtype and the scales of stored keys and values.

    A scale is a constant of its layer: a stored value depends on its token only, whichever node or chunk wrote it.
    Scales are powers of two, so multiplying by them is exact in every dtype that models compute in.
    """

    dtype: str | None = None  # None: the dtype that the model computes in
    # (layer of the target, "k" or "v") -> scale; 1 for others
    scales: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def stored(self, plane: Plane) -> Plane:
        """Return the plane as it is stored. Only keys and values of attention change."""
        if self.dtype is None or plane.kept is not Kept.PAGED or plane.name not in ATTENTION_PLANES:
            return plane
        scale = self.scales.get((plane.layer, plane.name), 1.0) if plane.owner == "target" else 1.0
        return msgspec.structs.replace(plane, dtype=self.dtype, scale=scale)


AS_COMPUTED: Final = KvValues()
