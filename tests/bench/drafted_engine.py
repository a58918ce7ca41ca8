"""An engine without processes: a target, its draft, their pools, a prefill step and a decode step, as in nodes.

Prompts are prefilled and decoded in one KV pool; nothing is transferred. `shapes.py` makes or loads the models.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.config.schema import Cluster, DecodeSection, Kv, Model, Speculation
from common.engine.attention.step_attention import StepAttention
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import OneAxis
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.draft_row import DraftRow
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import WindowShape
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.layer_kinds import prompt_grid, window_widths
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.pool_spec import pool_spec
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.node.completion import completion_for
from common.node.memory import MemoryPlan
from common.node.serving_model import KeptState, NodeMemory, ServingModel
from common.node_plan import PoolBudget
from common.observability.logs import Log
from decode_node.batch_rows import BatchRows
from decode_node.build import step_sizes
from decode_node.page_table import PageTable
from decode_node.request import DecodeRequest
from decode_node.step import DecodeSteps
from decode_node.steps import decode_steps
from prefill_node.cost_curve import CostCurve
from prefill_node.draft import EaglePrefill, NoDraft, PrefillDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import plan_chunks
from prefill_node.step import PrefillStep
from prefill_node.vision import TextEmbeds
from tests.bench.shapes import Pair

PAGE = 16
CHUNK = 8192


class Engine:
    """Pools for `rows` requests of `max_len` tokens, and steps over them."""

    def __init__(
        self,
        pair: Pair,
        rows: int,
        max_len: int,
        steps: int,
        graphs: str = "auto",
        slots: int = 0,
        kv: KvValues = AS_COMPUTED,
        shorter: int = 0,
    ) -> None:
        """Allocate the pools and load the models.

        Args:
            slots: KV slots that the widest step writes per request; 0: those of a round.
            shorter: by how many tokens all requests but one are shorter than `max_len`.
        """
        self.pair = pair
        self.steps = steps
        self._graphs = graphs
        model, placement, config = pair.model, pair.placement, pair.model.config
        self.device = placement.device
        self._extra = extra = 2 * max(slots, steps + 1)
        pages = rows * -(-(max_len - shorter + extra) // PAGE) + -(-shorter // PAGE) + 1
        spec = pool_spec(config, pair.draft.model, PAGE, str(placement.dtype).removeprefix("torch."), kv)
        served = ServingModel(
            model=model,
            config=config,
            placement=placement,
            fingerprint="bench",
            spec=spec,
            num_pages=pages,
            max_model_len=max_len,
            memory=NodeMemory(PoolBudget(pages * PAGE, 1.0, "decode"), MemoryPlan(0, 0)),
            draft=pair.serving,
        )
        if spec.state_bytes:
            window = WindowShape(window_widths(config, placement.shard), steps + 1, placement.dtype)
            served = replace(served, state=KeptState(rows, window))
        self._served = served
        layout = served.layout
        storage = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self.device)
        self.pool = KvPool(layout, "target", storage)
        attention = StepAttention(self.pool, config.sliding_windows, config.attention_scale)
        self.runner = ModelRunner(model, self.pool, attention)
        drafting = served.draft_runner(self.pool, StepAttention)
        assert drafting is not None
        draft_runner, self.draft_pool = drafting
        assert isinstance(draft_runner, DraftRunner)
        self.draft_runner = draft_runner
        eager = prompt_graphs.DraftPrefillPlan(self.runner, PhaseSwitch("none"), CHUNK)
        self._draft_prefill = prompt_graphs.draft_head_graphs(draft_runner, pair.draft, eager).forward
        self.space = PageSpace(PAGE, pages, NoPrefixCache(), num_slots=served.num_slots)
        self.rows = BatchRows(rows)
        self.table = PageTable(rows, self.space.pages_for(max_len + extra), self.device)
        carried = served.draft_shape
        self.relay = RelayState.allocate(rows, config.vocab_size, self.device, carried, served.state.window)

    def step(self, algorithm: str, graphs: str | None = None, constrains: bool = False) -> DecodeSteps:
        """Return the decode node's own steps for an algorithm or "none", captured.

        Args:
            graphs: a value of `decode.graphs`; None: the engine's.
            constrains: whether steps verify the tokens that grammars force.
        """
        cluster = Cluster(
            model=Model(path="bench"),
            kv=Kv(page_size=PAGE),
            decode=DecodeSection(max_running=self.rows.free, graphs=graphs or self._graphs),  # type: ignore[arg-type]
            speculation=Speculation(algorithm=algorithm, steps=self.steps),
        )
        draft = self.draft_runner if algorithm != "none" else None
        steps = decode_steps(
            step_sizes(cluster, constrains), self._served, self.runner, draft, self.table, self.relay
        )
        for phase in steps.graphs:
            node_graphs.capture(phase, Log("bench"))
            failed = [row.error for row in phase.forward.graphs.rows if row.error]
            assert not failed, failed
        return steps

    @torch.inference_mode()
    def start(self, prompts: Sequence[list[int]], max_tokens: int, drafting: bool) -> list[DecodeRequest]:
        """Prefill and draw first tokens. Returns greedy requests as they enter a decode batch, with pages for all."""
        draft: PrefillDraft = EaglePrefill(self._draft_prefill) if drafting else NoDraft()
        adjustments = AdjustmentRows.allocate(len(prompts), self.runner.model.config.vocab_size, self.device)
        completion = completion_for(self.device, False)
        rest = adjustments, OneAxis(), PAGE, completion
        step = PrefillStep(self.runner, TextEmbeds(), draft, *rest)
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prefills, started = [], []
        for prompt in prompts:
            prefill = PrefillRequest(0, "bench", as_keys(prompt), 0, greedy, "bench", 0.0)
            pages = self.space.pages_for(len(prompt) + max_tokens + self._extra)
            prefill.lease = self.space.lease(prefill.keys, pages, 0)
            assert prefill.lease is not None, "the pool is too small for this batch"
            prefills.append(prefill)
        grid = prompt_grid(self.runner.model.config, PAGE)
        curve = CostCurve((CHUNK,), grid=grid)
        while chunks := plan_chunks(prefills, 0.0, curve, len(prefills), grid):
            finals = [chunk.request for chunk in chunks if chunk.final]
            launched = step.launch(prompt_plan(chunks, PAGE, draft.rules, 1))
            for chunk in chunks:
                chunk.request.scheduled += chunk.length
            launched.completion.wait()
            for prefill, drawn in zip(finals, launched.read().drawn, strict=True):
                assert drawn.token is not None
                started.append(self._enter(prefill, drawn.token.id, drawn.draft))
        return started

    def _enter(self, prefill: PrefillRequest, first: int, draft: DraftRow) -> DecodeRequest:
        request = DecodeRequest(
            room=0,
            request_id="bench",
            prompt=prefill.keys.tolist(),
            emitted=0,
            sampling=prefill.sampling,
            prefill=NodeRef(name="bench", role="prefill", incarnation="bench"),
            received=0.0,
            deadline=time.monotonic() + 3600,
            lease=prefill.lease,
            row=self.rows.take(),
            output=[first],
            launched=1,
        )
        assert request.lease is not None
        self.table.write([(request.row, logical, page) for logical, page in enumerate(request.lease.pages)])
        text, slot = [*request.prompt, first], request.lease.slot
        self.relay.write_row(request.row, text, 1, request.sampling, draft, slot=slot)
        return request

    def end(self, requests: Sequence[DecodeRequest]) -> None:
        """Release rows and pages; nothing may be in flight."""
        for request in requests:
            assert request.lease is not None
            request.lease.release()
            self.rows.give(request.row)


def random_prompts(pair: Pair, count: int, length: int, seed: int, more: int = 0) -> list[list[int]]:
    """Prompts that end in different tokens; a constructed target's text depends only on that token.

    The first prompt has `more` tokens more than the others.
    """
    draw = random.Random(seed)
    last = draw.sample(range(pair.first_id, pair.model.config.vocab_size), count)
    ids = range(pair.first_id, pair.model.config.vocab_size)
    prompts = [[*draw.choices(ids, k=length - 1), end] for end in last]
    prompts[0] = [*draw.choices(ids, k=more), *prompts[0]]
    return prompts
