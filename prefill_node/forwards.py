"""Composes the forwards of a prefill node over one KV pool. Their graphs are captured later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.attention.backend import AttentionBackend
from common.engine.attention.paged import PagedAttention
from common.engine.attention.prompt_attention import PromptAttention
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.state.pool import KvPool
from common.kv_cache.pool_layout import PoolLayout
from common.node.serving_model import ServingModel
from prefill_node.arriving_layers import ArrivingAttention, ArrivingLayers, DraftArrivingAttention
from prefill_node.draft import BuiltDraft, DraftSetup, PrefillDraft
from prefill_node.draft_table import make_draft
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.graphs.prefill_extend import PrefillExtend
from prefill_node.signalled_attention import SignalledAttention
from prefill_node.vision_stage import VisionStage


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """The sizes and features that the forwards must support."""

    wanted: PhaseSwitch
    chunk_tokens: int
    max_batch: int
    layers: bool  # pages are sent layer by layer
    algorithm: str  # speculative algorithm
    hidden_states: bool = False  # requests may ask for hidden states
    loads: bool = False  # cached prefixes are copied from host memory


@dataclass(frozen=True, slots=True)
class Forwards:
    """The forwards of a node over one KV pool; `graphs` are not captured yet."""

    layout: PoolLayout
    runner: ModelRunner
    attention: PromptAttention
    draft_attention: PagedAttention | None  # None without a draft model
    signalled: SignalledAttention | None  # wraps the target's attention if pages are sent layer by layer
    # what the next forward waits for, if cached prefixes are copied from host memory
    arriving: ArrivingLayers
    target: NodeGraphs[PrefillExtend]
    draft: PrefillDraft
    vision: VisionStage
    graphs: Sequence[NodeGraphs[Any]]  # the graphs of all forwards


def prompt_forwards(
    sizes: PromptSizes,
    served: ServingModel,
    make_stage: Callable[[PhaseSwitch], VisionStage],
    bodies: CompiledBodies,
) -> Forwards:
    """Compose the forwards over a new pool of `served.num_pages`.

    Args:
        make_stage: builds the vision stage with the configured graphs.
        bodies: cache of compiled models, which a trial and the final graphs share.
    """
    layout = served.layout
    storage = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=served.placement.device)
    pool = KvPool(layout, "target", storage)
    buckets = prefill_token_buckets(sizes.chunk_tokens)
    config = served.config
    attention = PromptAttention(pool, config.sliding_windows, buckets, config.attention_scale)
    signalled = SignalledAttention(attention) if sizes.layers else None
    arriving = ArrivingLayers()
    outer: AttentionBackend = signalled or attention
    if sizes.loads:
        unbroken = prompt_graphs.unbroken_tokens(served.placement, sizes.wanted)
        outer = ArrivingAttention(outer, arriving, unbroken)
    runner = ModelRunner(served.model, pool, outer)
    drafting, draft_attention = _draft(sizes, served, runner, arriving)
    hidden = CaptureHiddenMode.FULL if sizes.hidden_states else drafting.draft.hidden_mode
    on_device = 0
    # Pages that are sent or loaded layer by layer need the breaks between layers.
    if not (sizes.layers or sizes.loads):
        on_device = attention.tokens_on_device(served.heads, served.placement.dtype, sizes.chunk_tokens)
    target = prompt_graphs.prefill_graphs(
        runner, sizes.wanted, sizes.chunk_tokens, sizes.max_batch, hidden, bodies, on_device
    )
    vision = make_stage(sizes.wanted)
    graphs: list[NodeGraphs[Any]] = [target, *drafting.graphs, *vision.graphs]
    return Forwards(
        layout=layout,
        runner=runner,
        attention=attention,
        draft_attention=draft_attention,
        signalled=signalled,
        arriving=arriving,
        target=target,
        draft=drafting.draft,
        vision=vision,
        graphs=graphs,
    )


def _draft(
    sizes: PromptSizes, served: ServingModel, target: ModelRunner, arriving: ArrivingLayers
) -> tuple[BuiltDraft, PagedAttention | None]:
    """Build the draft's part of a step, and its attention.

    The loaded draft already shares the target's embedding and LM head.
    """
    own: list[PagedAttention] = []

    def attention(pool: KvPool, windows: Sequence[int | None], scale: float | None) -> AttentionBackend:
        own.append(PagedAttention(pool, windows, scale))
        return DraftArrivingAttention(own[-1], arriving) if sizes.loads else own[-1]

    made, loaded = served.draft_runner(target.pool, attention), served.draft
    runner = None if made is None else made[0]
    plan = prompt_graphs.DraftPrefillPlan(target, sizes.wanted, sizes.chunk_tokens)
    setup = DraftSetup(runner, None if loaded is None else loaded.config, plan)
    return make_draft(sizes.algorithm, setup), own[-1] if own else None
