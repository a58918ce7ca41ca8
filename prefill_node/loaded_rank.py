"""One rank of a prefill node from its checkpoint to captured forwards; all ranks of a node do the same together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.ranks import expert_division
from common.engine.ops.tiles import each_division
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.kv_cache.layer_kinds import prompt_grid
from common.node import graph_start
from common.node.completion import completion_for
from common.node.ranks.peers import RankPeers
from common.node.serving_device import serving_device
from common.node.serving_model import ServingModel, load_serving_model
from common.node_plan import NodePlan
from common.observability.logs import Log
from kv_transfer.transport.cuda.cudart import CudaRuntime
from prefill_node.assemble import Computation
from prefill_node.forwards import Forwards, PromptSizes, prompt_forwards
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.limits import whole_chunks
from prefill_node.measure import NOT_MEASURED, MeasuredNode, MeasuredTimes, measure_forwards
from prefill_node.vision_stage import VisionStage
from prefill_node.warm_up import warm_up

MakeStage = Callable[[PhaseSwitch], VisionStage]


@dataclass(frozen=True, slots=True)
class LoadedPromptRank:
    """The models of a rank; the ranks of its node have agreed on the size of their pools."""

    served: ServingModel
    sizes: PromptSizes
    grid: int  # chunks of prompts end at its multiples
    make_stage: MakeStage
    bodies: CompiledBodies
    peers: RankPeers

    def forwards(self) -> Forwards:
        """Compose the forwards over a new pool. Their graphs are not captured."""
        return prompt_forwards(self.sizes, self.served, self.make_stage, self.bodies)

    def capture(self, forwards: Forwards, log: Log) -> MeasuredTimes:
        """Capture the graphs that all ranks can have, run what no graph has run, and return the times of forwards."""
        self.peers.report("capturing")
        encoders = forwards.vision.graphs
        divided = [each for each in forwards.graphs if each not in encoders]
        graph_start.capture(self.served, divided, log, self.peers.exchange)
        if encoders:
            graph_start.capture(self.served, encoders, log)
        # The other ranks have no encoders, and no collective waits for as long as rank 0 may capture.
        self.peers.exchange(b"")
        self.peers.report("warming")
        self._warm_up(forwards, log)
        return self._measured(forwards, log)

    def computation(self, forwards: Forwards, measured: MeasuredTimes) -> Computation:
        """Return the parts of a worker."""
        served = self.served
        device, config = served.placement.device, served.config
        return Computation(
            forwards,
            AdjustmentRows.allocate(self.sizes.max_batch, config.vocab_size, device),
            rotary_places(config.rope),
            completion_for(device, one_behind=False),
            served.draft_shape.dtype_name,
            measured,
        )

    def _warm_up(self, forwards: Forwards, log: Log) -> None:
        """Run what no graph has run yet, so that the first requests do not wait for kernels to compile."""
        started, layout, served, sizes = time.monotonic(), forwards.layout, self.served, self.sizes
        _warm_up_attention(forwards, served, sizes)
        device, keeps_state = served.placement.device, layout.num_slots > 0
        axes = served.config.rope.axes
        # Kernels are compiled for the number of prompts that a forward ends. Nothing is compiled on a CPU.
        prompts = each_division(sizes.max_batch) if device.type == "cuda" else [1]
        warm_up(forwards.target.forward, forwards.draft, layout.page_size, device, axes, keeps_state, prompts)
        images_run = forwards.vision.embeds.warm_up()
        log.info("warmed up", encoder_forwards=images_run, seconds=round(time.monotonic() - started, 3))

    def _measured(self, forwards: Forwards, log: Log) -> MeasuredTimes:
        """Return the times of forwards on a GPU. On a CPU the default curve keeps plans deterministic."""
        served, layout = self.served, forwards.layout
        device, config = served.placement.device, served.config
        if device.type != "cuda":
            return NOT_MEASURED
        started = time.monotonic()
        node = MeasuredNode(
            largest=self.sizes.chunk_tokens,
            longest=served.max_model_len,
            vocab_size=config.vocab_size,
            page_size=layout.page_size,
            device=device,
            axes=config.rope.axes,
            state=layout.num_slots > 0,
        )
        times = measure_forwards(forwards.target.forward, forwards.draft, node)
        shown = {str(tokens): round(ms, 2) for tokens, ms in times.by_tokens.items()}
        seconds = round(time.monotonic() - started, 3)
        context_ns = round(1e6 * times.context_ms, 3)
        log.info("forwards measured", ms=shown, context_ns=context_ns, seconds=seconds)
        return times


def _warm_up_attention(forwards: Forwards, served: ServingModel, sizes: PromptSizes) -> None:
    dtype = served.placement.dtype
    forwards.attention.warm_up(served.heads, dtype, sizes.chunk_tokens, sizes.max_batch)
    if served.draft is not None and forwards.draft_attention is not None:
        # Modules of MTP run over rows before those of each chunk, too.
        most = sizes.chunk_tokens + served.draft.config.modules * sizes.max_batch
        forwards.draft_attention.warm_up(served.draft_heads, dtype, most, sizes.max_batch)


def load_prompt_rank(
    plan: NodePlan,
    sizes: PromptSizes,
    peers: RankPeers,
    stage_of: Callable[[ServingModel], MakeStage],
    bodies: CompiledBodies,
    log: Log,
) -> LoadedPromptRank:
    """Load the share of one rank, and agree with the others on the size of the pool.

    Raises ConfigError or ModelError with the remedy.

    Args:
        stage_of: loads the vision part of the model, if this rank has it.
    """
    peers.connect(serving_device(plan.device), CudaRuntime, log)
    served = load_serving_model(plan, peers, log, peers.ranks(expert_division(plan.expert_parallel)))
    make_stage = stage_of(served)
    peers.report("allocating")
    grid = prompt_grid(served.config, served.page_size)
    chunk_tokens = whole_chunks(sizes.chunk_tokens, grid)
    if chunk_tokens != sizes.chunk_tokens:
        log.info("chunk size rounded", chunk_tokens=chunk_tokens, grid=grid)
        sizes = replace(sizes, chunk_tokens=chunk_tokens)

    def forwards() -> Forwards:
        return prompt_forwards(sizes, served, make_stage, bodies)

    def warmed_up() -> Sequence[NodeGraphs[Any]]:
        made = forwards()
        _warm_up_attention(made, served, sizes)
        placement = served.placement
        for prompts in each_division(sizes.max_batch):
            hidden = torch.zeros(
                prompts, served.config.hidden_size, dtype=placement.dtype, device=placement.device
            )
            served.model.logit_rows(hidden)
        return made.graphs

    peers.report("compiling")
    graph_start.compiled(served.placement.device, warmed_up, log, peers.exchange)
    peers.report("sizing")
    served = graph_start.sized(served, lambda: forwards().graphs)
    served = graph_start.agreed(served, peers.exchange)
    return LoadedPromptRank(served, sizes, grid, make_stage, bodies, peers)
