"""PoolSpec: the planes of a target and its draft.

It depends only on configs, so it is known before loading weights.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.checkpoint.model_config import ModelConfig
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.layer_kinds import mixer_record
from common.kv_cache.plane import Kept, Owner, Plane, Size
from common.kv_cache.shard import Shard


class PoolSpec(msgspec.Struct, frozen=True):
    """The state of one request. The planes of a layer are adjacent; the target's layers come first."""

    page_size: Size  # tokens
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=8192)]

    def __post_init__(self) -> None:
        """Raise ValueError if a plane appears twice."""
        names = {(plane.owner, plane.layer, plane.name) for plane in self.planes}
        if len(names) != len(self.planes):
            raise ValueError("a pool spec names a plane twice")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all planes and ranks."""
        return self.page_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds over all planes and ranks."""
        return sum(plane.entry_bytes for plane in self.planes if plane.kept is Kept.PAGED)

    @property
    def state_bytes(self) -> int:
        """Bytes that a request keeps in addition to pages, over all planes and ranks; 0 without per-request planes."""
        return sum(plane.entry_bytes for plane in self.planes if plane.kept is Kept.PER_REQUEST)

    def share(self, shard: Shard) -> PoolSpec:
        """Return what one rank keeps of it, whose sizes are those of that rank."""
        replace = msgspec.structs.replace
        planes = (replace(plane, entry=shard.entry(plane), groups=()) for plane in self.planes)
        return replace(self, planes=tuple(planes))


def pool_spec(
    target: ModelConfig,
    draft: ModelConfig | None,
    page_size: int,
    dtype: str,
    values: KvValues = AS_COMPUTED,
) -> PoolSpec:
    """Return the spec of a node that serves `target` with `draft`, both of which compute in `dtype`.

    Args:
        values: how keys and values of both are stored.
    """
    planes = model_planes("target", target, dtype)
    if draft is not None:
        planes += model_planes("draft", draft, dtype)
    return PoolSpec(page_size, tuple(values.stored(plane) for plane in planes))


def model_planes(owner: Owner, config: ModelConfig, dtype: str) -> tuple[Plane, ...]:
    """Return the planes of one model, layer by layer, as each layer's mixer defines them."""
    return tuple(
        plane
        for layer in range(config.num_layers)
        for plane in mixer_record(config, layer).planes(owner, config, layer, dtype)
    )
