"""Pools and layouts of a given size, from the same spec as a node's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.placement import Placement
from common.engine.state.pool import KvPool
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.plane import HeadGroup, Kept, Owner, Plane, attention_layer
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec, pool_spec
from common.kv_cache.shard import WHOLE, Shard


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_planes(
    owner: Owner, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> tuple[Plane, ...]:
    """Return keys and values of `layers` attention layers that are all alike."""
    return tuple(
        plane for layer in range(layers) for plane in attention_layer(owner, layer, kv_heads, head_dim, dtype)
    )


def plain_pool(
    layers: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KvPool:
    """Make a pool of identical attention layers."""
    spec = PoolSpec(page_size, attention_planes("target", layers, kv_heads, head_dim, name_of(dtype)))
    return empty_pool(spec, num_pages, torch.device(device))


def model_pool(
    config: ModelConfig,
    page_size: int,
    num_pages: int,
    placement: Placement,
    num_slots: int = 0,
    kv: KvValues = AS_COMPUTED,
) -> KvPool:
    """Make a pool for one model. Slots exist only if the model keeps a state per request."""
    spec = pool_spec(config, None, page_size, name_of(placement.dtype), kv)
    slots = num_slots if spec.state_bytes else 0
    return empty_pool(spec, num_pages, placement.device, slots, placement.shard)


def empty_pool(
    spec: PoolSpec, num_pages: int, device: torch.device, num_slots: int = 0, shard: Shard = WHOLE
) -> KvPool:
    """Make a target's pool filled with zeros: a rank's share of its planes."""
    layout = PoolLayout(
        fingerprint="pool",
        spec=spec,
        num_pages=num_pages,
        num_slots=num_slots,
        tp_rank=shard.rank,
        tp_size=shard.size,
    )
    return KvPool(layout, "target", torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device))


def layers_layout(
    fingerprint: str,
    dtype: str,
    page_size: int,
    num_pages: int,
    layers: Sequence[tuple[int, int]],
    tp_rank: int = 0,
    tp_size: int = 1,
) -> PoolLayout:
    """Make a layout of attention layers with the given (KV heads, head_dim)."""
    planes = tuple(
        Plane("target", layer, name, Kept.PAGED, (heads, dim), dtype, 0, (HeadGroup(heads, 1),))
        for layer, (heads, dim) in enumerate(layers)
        for name in ("k", "v")
    )
    return PoolLayout(
        fingerprint=fingerprint,
        spec=PoolSpec(page_size, planes),
        num_pages=num_pages,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
