"""Composes the steps of a decode node over one KV pool. Their graphs are captured later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.engine.attention.step_attention import StepAttention
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.kv_cache.pool_layout import PoolLayout
from common.node.serving_model import ServingModel
from decode_node.page_table import PageTable
from decode_node.progress_mark import ProgressAttention, ProgressMark
from decode_node.step import DecodeSteps
from decode_node.steps import StepSizes, decode_steps

# Arguments: sizes, model, the target's runner, the draft's runner or None, page table, relay rows.
MakeSteps = Callable[[StepSizes, ServingModel, ModelRunner, object, PageTable, RelayState], DecodeSteps]


@dataclass(frozen=True, slots=True)
class Forwards:
    """The steps of a node over one KV pool; `graphs` are not captured yet."""

    layout: PoolLayout
    pools: Sequence[KvPool]  # the target's, and the draft's if there is one
    table: PageTable
    steps: DecodeSteps
    mark: ProgressMark  # written by every step

    @property
    def graphs(self) -> Sequence[NodeGraphs[Any]]:
        return self.steps.graphs


def step_forwards(
    sizes: StepSizes,
    served: ServingModel,
    relay: RelayState,
    allocate: Callable[[int], Tensor],
    make_steps: MakeSteps = decode_steps,
) -> Forwards:
    """Compose the steps over a pool of `served.num_pages`, whose bytes come from `allocate`."""
    layout = served.layout
    pool = KvPool(layout, "target", allocate(layout.total_bytes))
    # Branches of draft trees extend past the last token of a request.
    longest = served.max_model_len + 2 * sizes.lookahead_slots
    table = PageTable(sizes.max_running, -(-longest // served.page_size), served.placement.device)
    config = served.config
    writing = {layer for layer in range(config.num_layers) if pool.planes(layer)}
    mark = ProgressMark(config.num_layers, writing, served.placement.device)
    attention = ProgressAttention(pool, config.sliding_windows, config.attention_scale, mark)
    runner = ModelRunner(served.model, pool, attention)
    draft = served.draft_runner(pool, StepAttention)
    pools = [pool] if draft is None else [pool, draft[1]]
    steps = make_steps(sizes, served, runner, None if draft is None else draft[0], table, relay)
    return Forwards(layout, pools, table, steps, mark)
