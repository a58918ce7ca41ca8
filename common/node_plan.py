"""The cluster file resolved once for one process, as plain values: what is built from it sees no config object."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class PoolWish:
    """How large a node's KV pool is to be: so many tokens, or what the node's share of its GPU leaves (None)."""

    tokens: int | None
    fraction: float
    section: str  # of the config: prefill or decode
    sees: bool = False  # where the model has a vision part, this node runs it
    image_bytes: int = 0  # for a cache of what comes out of it

    @property
    def key(self) -> str:
        return f"{self.section}.{'memory_fraction' if self.tokens is None else 'pool_tokens'}"


class NodeShare(msgspec.Struct, frozen=True):
    """What one node of the cluster takes of its device."""

    device: str
    pool: PoolWish
    max_rows: int  # requests in one step


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint is loaded, and how."""

    path: str
    dtype: str  # auto, or torch's name
    max_model_len: int | None  # None: the model's own


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How decode nodes draft. Prefill nodes make the draft's KV and state."""

    algorithm: str  # name of its record
    draft_path: str | None  # None: the algorithm has no draft model
    steps: int
    topk: int


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How pages and records move; seconds are local."""

    transport: str
    layers: bool  # pages leave layer by layer
    verify_checksums: bool
    slots_timeout: float
    first_page_timeout: float
    stall_timeout: float


class RouterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router is, and how soon either side notices that the other is gone."""

    address: str
    heartbeat_interval: float
    timeout: float


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill or decode process."""

    role: str
    name: str
    device: str
    threads: int  # of torch on a CPU; 0: torch's default
    page_size: int
    pool: PoolWish
    max_rows: int  # requests in one step
    shares: tuple[NodeShare, ...]  # of all nodes of the cluster, this one included
    model: ModelPlan
    speculation: SpeculationPlan
    transfer: TransferPlan
    router: RouterPlan
