"""The cluster file resolved for one process into plain values, so that only the composition root sees the config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from common.kv_cache.pool_spec import PoolSpec
from common.kv_cache.shard import WHOLE, Shard
from common.kv_cache.snapshot_budget import NO_SNAPSHOTS, SnapshotBudget
from common.kv_events.plan import KvEventsPlan


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """The requested size of a node's KV pool: a number of tokens, or what the node's share of its GPU leaves (None)."""

    tokens: int | None
    fraction: float
    section: str  # config section: prefill or decode
    runs_vision: bool = False  # this node runs the model's vision part, if there is one
    image_bytes: int = 0  # size of a cache for the vision part's output
    # This is one half of a movable node. The half for decoding has no weights: it uses those of the other one.
    movable: bool = False

    @property
    def has_weights(self) -> bool:
        """True if the node loads weights itself."""
        return not (self.movable and self.section == "decode")

    @property
    def key(self) -> str:
        if self.movable:
            return f"movable.{self.section}_{'memory_fraction' if self.tokens is None else 'pool_tokens'}"
        return f"{self.section}.{'memory_fraction' if self.tokens is None else 'pool_tokens'}"


class NodeShare(msgspec.Struct, frozen=True):
    """The resources that one rank of a node of the cluster takes of its device."""

    device: str
    pool: PoolBudget
    max_rows: int  # requests in one step
    state_slots: int = 0  # requests that hold a state at once, where the model keeps one; slot 0 not counted
    round_tokens: int = 0  # new tokens of a request in one decode step, at most; 0 on prefill nodes
    # saved states of cached prefixes, where the model keeps one; none: no prefix cache there
    state_snapshots: SnapshotBudget = NO_SNAPSHOTS
    shard: Shard = WHOLE  # what it holds of model and pool
    expert_parallel: bool = False  # of experts it holds some whole, not a part of each


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to load, and how."""

    path: str
    weights_id: str  # fingerprint of the weights, equal on all nodes of a cluster
    dtype: str  # torch's name of the dtype of weights, activations and KV
    max_model_len: int | None  # None: the model's own
    quantization: str = "none"  # applied to dense weights while they are loaded


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of decode nodes. Prefill nodes compute the KV and the state of the draft model."""

    algorithm: str  # name of the algorithm's record
    draft_path: str | None  # None if the algorithm has no draft model
    steps: int
    topk: int
    draft_quantization: str = "none"  # applied to the draft model's dense weights while they are loaded


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer of pages and records; timeouts are in seconds."""

    transport: str
    layers: bool  # pages are sent layer by layer
    verify_checksums: bool
    slots_timeout: float
    first_page_timeout: float
    stall_timeout: float


class RouterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of all routers, and how soon either side notices the loss of the other."""

    addresses: tuple[str, ...]
    found: int = 1  # links to routers, if the address says how they are found
    heartbeat_interval: float
    timeout: float


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one rank of a prefill or decode node."""

    role: str
    name: str
    device: str  # of this rank
    devices: tuple[str, ...]  # of all ranks of the node
    expert_parallel: bool  # each rank has some experts whole
    threads: int  # torch's threads on a CPU; 0: torch's default
    spec: PoolSpec  # what one request keeps: the planes of the target and its draft
    pool: PoolBudget
    max_rows: int  # requests in one step
    state_slots: int  # as in NodeShare
    round_tokens: int
    state_snapshots: SnapshotBudget  # as in NodeShare
    # The ranks of all nodes that may be on its GPUs, including this one: all listed nodes, or only its own ranks if it
    # joins by a pattern.
    shares: tuple[NodeShare, ...]
    model: ModelPlan
    speculation: SpeculationPlan
    transfer: TransferPlan
    router: RouterPlan
    kv_events: KvEventsPlan | None = None  # None: it publishes none

    @property
    def page_size(self) -> int:
        return self.spec.page_size

    def of_rank(self, rank: int) -> NodePlan:
        """Return the plan of another rank of this node."""
        # Only rank 0 encodes images.
        pool = dataclasses.replace(self.pool, runs_vision=False, image_bytes=0) if rank else self.pool
        return msgspec.structs.replace(self, device=self.devices[rank], pool=pool)
