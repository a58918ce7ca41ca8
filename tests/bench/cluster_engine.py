"""The computation of both nodes of a cluster file in one process: no sockets, no scheduler, nothing is transferred.

Models, threads, graphs and steps come from the file exactly as in the nodes; both computations share one KV pool.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import Resolved, load_cluster
from common.config.resolve_node import node_plan
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.sampling.sampling_plan import sampling_variant
from common.engine.state.relay_state import RelayState
from common.grammar.model_tokenizer import has_tokenizer
from common.huge_pages import use_huge_pages
from common.kv_cache.page_space import as_keys
from common.messages.generation import SamplingParams
from common.node import graph_start
from common.node.completion import completion_for
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node.build import step_sizes
from decode_node.forwards import Forwards, step_forwards
from decode_node.step_plan import PlannedRow, StepPlan
from prefill_node import forwards as prompts
from prefill_node.assemble import Computation, prompt_step
from prefill_node.build import compiled_bodies
from prefill_node.images import NoImages
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.step_result import Drawn
from prefill_node.vision import TextEmbeds
from prefill_node.vision_stage import VisionStage

LOG = Log("bench")


@dataclass(frozen=True, slots=True)
class Times:
    """One request: seconds of the prompt's forward and of each step, and the tokens of each step."""

    forward: float
    steps: Sequence[float]
    tokens: Sequence[int]

    def seconds_after(self, count: int) -> float:
        """Return the seconds of the steps after those that drew the first `count` tokens of `tokens`."""
        drawn = itertools.accumulate(self.tokens)
        return sum(seconds for seconds, end in zip(self.steps, drawn) if end > count)


def resolved_cluster(path: Path, pool_tokens: int = 8192) -> Resolved:
    """Load a cluster file, with pools of equal size in both nodes."""
    sizes = [f"{section}.pool_tokens={pool_tokens}" for section in ("prefill", "decode")]
    return load_cluster(path, sizes)


class ClusterEngine:
    """Answers one request at a time, greedily."""

    def __init__(self, path: Path) -> None:
        resolved = resolved_cluster(path)
        cluster = resolved.cluster
        reporter = StartupReporter(None, LOG)

        def served(role: str, name: str) -> ServingModel:
            plan = node_plan(cluster, role, name, resolved.model_path, resolved.draft_path)
            return load_serving_model(plan, reporter, LOG)

        self._prefill = served("prefill", cluster.prefill.nodes[0].name)
        decode = served("decode", cluster.decode.nodes[0].name)
        section, device = cluster.prefill, self._prefill.placement.device
        sizes = prompts.PromptSizes(
            wanted=PhaseSwitch(section.graphs, section.enforce_graphs),
            chunk_tokens=section.chunk_tokens,
            max_batch=section.max_batch,
            layers=False,
            algorithm=cluster.speculation.algorithm,
        )
        stage = VisionStage(NoImages(), TextEmbeds())
        bodies = compiled_bodies(section.compiler, device.type)
        forwards = prompts.prompt_forwards(sizes, self._prefill, lambda wanted: stage, bodies)
        graph_start.capture(self._prefill, forwards.graphs, LOG)
        self._rules = forwards.draft.rules
        self._prompt_step = prompt_step(
            Computation(
                forwards,
                AdjustmentRows.allocate(section.max_batch, self._prefill.config.vocab_size, device),
                rotary_places(self._prefill.config.rope),
                completion_for(device, one_behind=False),
                self._prefill.draft_shape.dtype_name,
            )
        )
        step = step_sizes(cluster, has_tokenizer(resolved.model_path))
        self._relay = RelayState.allocate(
            step.max_running, decode.config.vocab_size, device, decode.draft_shape, decode.state.window
        )
        storage = forwards.runner.pool.storage
        self._steps: Forwards = step_forwards(step, decode, self._relay, lambda nbytes: storage[:nbytes])
        graph_start.capture(decode, self._steps.graphs, LOG)
        self._space = page_space(self._prefill, False)
        use_huge_pages()  # as the nodes do

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], output: int) -> Times:
        """Compute `prompt` in one forward and draw `output` tokens."""
        sampling = SamplingParams(max_tokens=output, temperature=0.0)
        request = PrefillRequest(0, "bench", as_keys(list(prompt)), 0, sampling, "bench", 0.0)
        steps, page_size = self._steps.steps, self._space.page_size
        extra = 2 * steps.rules.tokens_of(steps.rules.widths.choose(1)) + steps.rules.extra_slots
        request.lease = self._space.lease(
            request.keys, self._space.pages_for(len(prompt) + output + extra), 0
        )
        assert request.lease is not None
        plan = prompt_plan([Chunk(request, 0, len(prompt))], page_size, self._rules, 1)
        began = time.perf_counter()
        (drawn,) = self._prompt_step.launch(plan).read().drawn
        forward = time.perf_counter() - began
        times, tokens = self._decode(prompt, drawn, request.lease.pages, sampling)
        request.lease.release()
        return Times(forward, times, tokens)

    def _decode(
        self, prompt: Sequence[int], drawn: Drawn, pages: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[float], list[int]]:
        assert drawn.token is not None
        steps = self._steps.steps
        self._relay.write_row(1, [*prompt, drawn.token.id], 1, sampling, drawn.draft)
        self._steps.table.write([(1, index, page) for index, page in enumerate(pages)])
        width = steps.rules.widths.choose(1)
        plan = StepPlan(
            generation=1,
            rows=(PlannedRow(1, len(pages), None),),
            width=width,
            sampling=sampling_variant([sampling]),
        )
        step = steps.of(plan)
        left = sampling.max_tokens - 1
        times: list[float] = []
        tokens: list[int] = []
        while left > 0:
            began = time.perf_counter()
            (row,) = step.launch(plan).read().rows
            times.append(time.perf_counter() - began)
            tokens.append(min(len(row.tokens), left))
            left -= len(row.tokens)
        return times, tokens
