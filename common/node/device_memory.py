"""The memory of a GPU that the nodes of a cluster take, computed before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.weight_formats import DENSE
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import OneRank, expert_division
from common.engine.models.checkpoint_layout import checkpoint_layout
from common.engine.models.model_registry import build_model
from common.engine.sampling.logit_adjustments import adjustment_bytes
from common.engine.state.state_rows import WindowShape
from common.engine.weights import resolve_dtype
from common.kv_cache.layer_kinds import window_widths
from common.kv_cache.shard import Shard
from common.node.encoder_memory import encoder_bytes
from common.node.memory import MemoryPlan, check_memory, check_share, weight_bytes
from common.node_plan import NodePlan, NodeShare


def check_memory_before_loading(plan: NodePlan, device: torch.device, shard: Shard) -> tuple[MemoryPlan, int]:
    """Return the GPU memory of a node's rank besides pool and graphs, and the bytes that other nodes take there.

    Both are 0 on a CPU.

    Raises ConfigError if this node, or all nodes of the cluster on this GPU, do not fit on it.
    """
    if device.type != "cuda":
        return MemoryPlan(0, 0, 0), 0
    path, budget, draft = Path(plan.model.path), plan.pool, plan.speculation.draft_path
    config = ModelConfig.load(path).quantized(plan.model.quantization)
    dtype = resolve_dtype(plan.model.dtype, config.dtype, device)
    layout = checkpoint_layout(config, path)
    files = [read_weight_files(each) for each in {path, Path(draft or path)}]
    names = (str(device), "cuda") if device.index == 0 else (str(device),)

    def taken(share: NodeShare) -> tuple[MemoryPlan, int]:
        """Return (the plan with an empty pool, bytes in total)."""
        pool, spec = share.pool, plan.spec.share(share.shard)
        window = WindowShape(window_widths(config, share.shard), share.round_tokens, dtype)
        # A pool that takes what is left has slots of its own, see `page_cost`.
        pages = 0 if pool.tokens is None else pool.tokens // spec.page_size + 1
        without = () if pool.runs_vision else layout.vision_prefixes
        memory = MemoryPlan(
            weights=sum(weight_bytes(each, dtype, without) for each in files)
            - bytes_not_held(config, dtype, share.shard, share.expert_parallel)
            if pool.has_weights
            else 0,
            pool=0,
            sampling=adjustment_bytes(share.max_rows, config.vocab_size),
            state=(share.state_slots + 1) * spec.state_bytes + window.nbytes(share.max_rows),
            snapshots=share.state_snapshots.slots(pages, plan.spec) * spec.state_bytes,
            weight_format="" if config.weights == DENSE else config.weights.method,
        )
        if config.vision is not None and pool.runs_vision:
            encoder = encoder_bytes(config.vision, config.hidden_size, dtype)
            memory = replace(memory, images=pool.image_bytes, encoder=encoder)
        if pool.tokens is None:
            return memory, int(torch.cuda.mem_get_info(device)[1] * pool.fraction)
        return memory, memory.total + (pool.tokens + spec.page_size) * spec.token_bytes

    there = [taken(each)[1] for each in plan.shares if each.device in names]
    slots = plan.state_slots, plan.round_tokens, plan.state_snapshots
    memory, own = taken(
        NodeShare(
            plan.device, budget, plan.max_rows, *slots, shard=shard, expert_parallel=plan.expert_parallel
        )
    )
    spec = plan.spec.share(shard)
    beside = sum(there) - own
    if budget.tokens is None:
        check_share(device, memory, beside, budget, plan.state_snapshots.page_cost(plan.spec, spec))
    else:
        check_memory(device, replace(memory, pool=own - memory.total), beside, budget.key, spec.token_bytes)
    return memory, beside


def bytes_not_held(
    config: ModelConfig, dtype: torch.dtype, shard: Shard, expert_parallel: bool = False
) -> int:
    """Return the bytes of a checkpoint, as `weight_bytes` counts them, that this rank does not hold; allocates nothing.

    Other ranks hold a part of them, and dense weights that are quantised while they are loaded become smaller. The
    result is negative where a scale per tensor is kept for every row.
    """
    nowhere = Placement(dtype, torch.device("meta"), OneRank(shard, expert_division(expert_parallel)))
    whole: dict[str, int] = {}
    held = 0
    for piece in build_model(config, nowhere).pieces():
        # A tensor that is quantised is dense in the file.
        itemsize = dtype.itemsize if piece.store is not None and piece.dtypes else piece.into.element_size()
        whole[piece.name] = math.prod(piece.whole) * itemsize
        held += 0 if piece.elsewhere else piece.into.nbytes
    return sum(whole.values()) - held
