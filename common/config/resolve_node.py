"""Resolves the cluster file into the plan of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common.checkpoint.draft_config import with_steps
from common.checkpoint.dtype_name import dtype_name
from common.checkpoint.kv_scales import kv_scales
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.config.kv_events import kv_events_plan
from common.config.movable_schema import MovableSection
from common.config.node_hosts import elsewhere
from common.config.schema import Cluster, DecodeSection, NodeEntry, PrefillSection, Speculation
from common.config.transport_choice import choose_layers, choose_transport
from common.errors import ConfigError
from common.kv_cache.kv_values import AS_COMPUTED, FP8, KvValues
from common.kv_cache.pool_spec import pool_spec
from common.kv_cache.shard import Shard
from common.kv_cache.snapshot_budget import GROWING, NO_SNAPSHOTS, SnapshotBudget
from common.node_names import NodeNames, is_pattern
from common.node_plan import (
    ModelPlan,
    NodePlan,
    NodeShare,
    PoolBudget,
    RouterPlan,
    SpeculationPlan,
    TransferPlan,
)
from common.speculation.directory import load_draft_config
from common.speculation.forced_widths import DRAFTED_WIDTHS
from common.speculation.table import algorithm


def node_plan(
    cluster: Cluster,
    role: str,
    name: str,
    model: Path,
    draft: Path | None = None,
    routers: Sequence[str] = (),
) -> NodePlan:
    """Plan the node `name`; reads the headers of its checkpoints, but no weights.

    Raises ConfigError if the file has no such node, or if these nodes cannot exchange pages, or not in the configured
    way, and ModelError for a checkpoint that cannot be read.

    Args:
        role: prefill or decode.
        model: directory of the checkpoint.
        draft: directory of the draft model; None if the algorithm has none.
        routers: addresses of the control sockets of all routers.
    """
    transfer, health, speculation = cluster.transfer, cluster.health, cluster.speculation
    entry_of = cluster.prefill_node if role == "prefill" else cluster.decode_node
    entry_of(name)  # refuses a name that no entry has
    shares = _shares(cluster)
    entry = NodeNames.of(each for of_role, each in shares if of_role == role).entry(name)
    assert entry is not None, "the shares are those of the entries"
    own = shares[role, entry][0]
    config = ModelConfig.load(model)
    dtype = dtype_name(cluster.model.dtype, config.dtype, own.device.partition(":")[0])
    if own.expert_parallel:
        _check_experts(config, len(shares[role, entry]), f"{role}.nodes[{entry}].expert_parallel")
    drafting = None
    if draft is not None:
        drafting = with_steps(
            load_draft_config(draft, speculation.algorithm, config), speculation.steps
        ).model
    return NodePlan(
        role=role,
        name=name,
        device=own.device,
        devices=tuple(share.device for share in shares[role, entry]),
        expert_parallel=own.expert_parallel,
        threads=cluster.process.threads,
        spec=pool_spec(config, drafting, cluster.kv.page_size, dtype, _kv_values(cluster, model)),
        pool=own.pool,
        max_rows=own.max_rows,
        state_slots=own.state_slots,
        round_tokens=own.round_tokens,
        state_snapshots=own.state_snapshots,
        shares=_shares_beside(cluster, shares, (role, entry)),
        model=ModelPlan(
            path=str(model),
            weights_id=model_fingerprint(model, cluster.model.max_model_len, cluster.model.quantization),
            dtype=dtype,
            max_model_len=cluster.model.max_model_len,
            quantization=cluster.model.quantization,
        ),
        speculation=SpeculationPlan(
            algorithm=speculation.algorithm,
            draft_path=None if draft is None else str(draft),
            steps=speculation.steps,
            topk=speculation.topk,
            draft_quantization=speculation.draft_quantization,
        ),
        transfer=TransferPlan(
            transport=choose_transport(cluster).name,
            layers=choose_layers(cluster),
            verify_checksums=transfer.verify_checksums,
            slots_timeout=transfer.slots_timeout,
            first_page_timeout=transfer.first_page_timeout,
            stall_timeout=transfer.stall_timeout,
        ),
        router=RouterPlan(
            addresses=tuple(routers),
            found=cluster.router.found_routers,
            heartbeat_interval=health.heartbeat_interval,
            timeout=health.router_timeout,
        ),
        kv_events=kv_events_plan(cluster, role, name, cluster.model.served_name or model.name),
    )


def _check_experts(config: ModelConfig, ranks: int, path: str) -> None:
    """Raise ConfigError if the ranks of a node cannot have some experts each."""
    if config.experts is None:
        raise ConfigError(path, "the model has no experts that the ranks could divide; leave it out")
    if config.experts.count < ranks:
        raise ConfigError(
            path,
            f"{config.experts.count} experts are too few for {ranks} ranks; leave it out, or write fewer ranks",
        )


def _kv_values(cluster: Cluster, model: Path) -> KvValues:
    """Return how the pages of all nodes store keys and values."""
    return KvValues(FP8, kv_scales(model)) if cluster.kv.dtype == "fp8" else AS_COMPUTED


def pool_budget(
    name: str,
    section: PrefillSection | DecodeSection,
    device_name: str,
    movable: MovableSection | None = None,
) -> PoolBudget:
    """Return the pool size that `section`, called `name`, asks for on a device.

    Args:
        movable: the section of movable nodes, for one of them; it takes precedence.
    """
    tokens: int | None = None
    own = "auto" if movable is None else movable.tokens_of(name)
    if own != "auto":
        tokens = own
    elif section.pool_tokens != "auto":
        tokens = section.pool_tokens
    elif device_name == "cpu":
        tokens = section.CPU_POOL_TOKENS
    fraction = section.memory_fraction if movable is None else movable.fraction_of(name)
    vision, images = section.runs_vision, section.image_bytes
    return PoolBudget(tokens, fraction, name, vision, images, movable is not None)


def movable_section(cluster: Cluster, name: str) -> MovableSection | None:
    """Return the section of movable nodes if `name` is one of them."""
    return None if cluster.movable.role_of(name) is None else cluster.movable


def _round_tokens(speculation: Speculation) -> int:
    """Return the most new tokens of a request in one step of a model that keeps a state per request.

    Every row has a window for them, so of the steps for forced tokens only the narrowest is served.
    """
    record = algorithm(speculation.algorithm)
    if not record.drafts:
        return 1
    has_draft_model = record.directory is not None
    forced = min(DRAFTED_WIDTHS) if has_draft_model and speculation.forced_tokens else 0
    return 1 + max(speculation.steps, forced)


def _shares(cluster: Cluster) -> dict[tuple[str, str], list[NodeShare]]:
    """Return the shares of the ranks of every node, by its role and name.

    Every request that holds pages has a state slot. A prefill node may hand over as many requests as it computes; a
    decode node may have as many in quarantine as are on their way.
    """
    prefill, decode = cluster.prefill, cluster.decode
    round_tokens = _round_tokens(cluster.speculation)
    rows, slots = decode.max_running, decode.max_running + 2 * decode.max_transferring
    found = {}
    for node in prefill.nodes:
        budget = pool_budget("prefill", prefill, node.rank_devices[0], movable_section(cluster, node.name))
        snapshots = _snapshots(prefill)
        share = NodeShare(
            node.rank_devices[0], budget, prefill.max_batch, 2 * prefill.max_batch, state_snapshots=snapshots
        )
        found["prefill", node.name] = _of_ranks(share, node)
    for decoding in decode.nodes:
        movable = movable_section(cluster, decoding.name)
        budget = pool_budget("decode", decode, decoding.rank_devices[0], movable)
        share = NodeShare(decoding.rank_devices[0], budget, rows, slots, round_tokens)
        found["decode", decoding.name] = _of_ranks(share, decoding)
    return found


def _snapshots(prefill: PrefillSection) -> SnapshotBudget:
    if not prefill.prefix_cache:
        return NO_SNAPSHOTS
    return GROWING if prefill.state_snapshots == "auto" else SnapshotBudget(prefill.state_snapshots)


def _shares_beside(
    cluster: Cluster, shares: Mapping[tuple[str, str], Sequence[NodeShare]], own: tuple[str, str]
) -> tuple[NodeShare, ...]:
    """Return the shares of all nodes that may be on the GPUs of an entry's node: a node that joins has its own GPUs."""
    if is_pattern(own[1]):
        return tuple(shares[own])
    nodes: dict[tuple[str, str], NodeEntry] = {("prefill", node.name): node for node in cluster.prefill.nodes}
    nodes |= {("decode", node.name): node for node in cluster.decode.nodes}
    beside = (
        key
        for key in shares
        # The other half of a movable node has the same name.
        if key[1] == own[1] or not (is_pattern(key[1]) or elsewhere(cluster, nodes[own], nodes[key]))
    )
    return tuple(share for key in beside for share in shares[key])


def _of_ranks(share: NodeShare, node: NodeEntry) -> list[NodeShare]:
    """Return the shares of a node's ranks, on their devices."""
    devices, experts = node.rank_devices, node.expert_parallel
    return [
        msgspec.structs.replace(
            share, device=device, shard=Shard(rank, len(devices)), expert_parallel=experts
        )
        for rank, device in enumerate(devices)
    ]
