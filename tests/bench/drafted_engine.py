"""An engine without processes: a target, its draft head, their pools, a prefill step and a decode step, as in nodes.

Prompts are prefilled and decoded in one KV pool; nothing is transferred. A model is loaded from directories, or
constructed on the device (deploy/tiny_models/constructed.py), which takes seconds where reading 16 GB takes a minute.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig
from common.config.schema import Cluster, DecodeSection, Kv, Model, Speculation
from common.engine.attention.step_attention import StepAttention
from common.engine.forward.draft_inputs import EagleDraftInput
from common.engine.forward.draft_runner import DraftRunner, load_eagle3
from common.engine.forward.model_runner import ModelRunner, load_model
from common.engine.forward.rotary_places import OneAxis
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import D2T, Eagle3Head
from common.engine.models.registry import build_model
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.draft_row import DraftRow, DraftShape
from common.engine.state.relay_state import RelayState, hidden_dtype
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.pool_spec import pool_spec
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.node.completion import completion_for
from common.node.loaded_draft import HeadDraft
from common.node.memory import MemoryPlan
from common.node.serving_draft import ServingDraft
from common.node.serving_model import ServingModel
from common.node_plan import PoolBudget
from common.observability.logs import Log
from common.speculation.directory import load_draft_config
from decode_node.batch_rows import BatchRows
from decode_node.build import step_sizes
from decode_node.page_table import PageTable
from decode_node.request import DecodeRequest
from decode_node.steps import DecodeSteps, decode_steps
from deploy.tiny_models.constructed import tensors
from deploy.tiny_models.constructed_head import Drafting, head_config, head_tensors
from deploy.tiny_models.constructed_shape import SPECIAL, Shape
from prefill_node.draft import EaglePrefill, NoDraft, PrefillDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import plan_chunks
from prefill_node.step import PrefillStep
from prefill_node.vision import TextEmbeds
from tests.fakes.pools import model_pool, plain_pool

PAGE = 16
CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the EAGLE-3 head that drafts for it, on one device."""

    model: CausalLM
    head: Eagle3Head
    draft: DraftConfig
    first_id: int  # the smallest id that occurs in prompts

    @property
    def placement(self) -> Placement:
        return self.model.placement


def constructed(shape: Shape, drafting: Drafting, seed: int, device: torch.device) -> Pair:
    """Construct a pair in memory; only two config files and the name of one tensor are written."""
    placement = Placement(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("target", shape.config()), ("draft", head_config(shape))):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(content))
        config = ModelConfig.load(Path(folder) / "target")
        # A head is recognised by its tensors.
        save_file({"fc.weight": torch.zeros(1)}, Path(folder) / "draft" / "model.safetensors")
        draft = load_draft_config(Path(folder) / "draft", "eagle3", config)
    model = build_model(config, placement, draft.aux_layers).eval()
    _fill(model.pieces(), tensors(shape, seed, device))
    head = Eagle3Head(draft, model, placement, (D2T,)).eval()
    weights = (pair for pair in head_tensors(shape, drafting, seed, device) if pair[0] != "t2d")
    _fill(head.pieces(), weights)
    return Pair(model, head, draft, SPECIAL)


def _fill(pieces: Iterable[Piece], weights: Iterable[tuple[str, Tensor]]) -> None:
    missing = {piece.name: piece.into for piece in pieces}
    with torch.no_grad():
        for name, weight in weights:
            missing.pop(name).copy_(weight)
    assert not missing, f"no weights for {sorted(missing)}"


def loaded(target: Path, draft: Path, device: torch.device) -> Pair:
    """Load a pair from Hugging Face directories."""
    described = load_draft_config(draft, "eagle3", ModelConfig.load(target))
    model, _ = load_model(target, "auto", device, aux_layers=described.aux_layers)
    head = load_eagle3(draft, described, model, model.placement)
    assert isinstance(head, Eagle3Head)
    return Pair(model, head, described, 8)


class Engine:
    """Pools for `rows` requests of `max_len` tokens, and steps over them."""

    def __init__(self, pair: Pair, rows: int, max_len: int, steps: int, graphs: str = "auto") -> None:
        self.pair = pair
        self.steps = steps
        self._graphs = graphs
        model, placement = pair.model, pair.placement
        self.device = placement.device
        behind = 2 * (steps + 1)
        pages = rows * -(-(max_len + behind) // PAGE) + 1
        self.pool = model_pool(model.config, PAGE, pages, placement)
        of = pair.draft.model
        shapes = of.num_layers, of.num_kv_heads, of.head_dim, PAGE, pages
        self.draft_pool = plain_pool(*shapes, placement.dtype, self.device)
        width, dtype = EagleDraftInput.hidden_size_for(pair.draft), EagleDraftInput.dtype_for(placement)
        topk = DraftShape(1, width, hidden_dtype(dtype), model.config.vocab_size)
        serving_draft = ServingDraft(HeadDraft(pair.head, 1), pair.draft, "bench", topk)
        self._served = ServingModel(
            model=model,
            config=model.config,
            placement=placement,
            fingerprint="bench",
            spec=pool_spec(model.config, of, PAGE, str(placement.dtype).removeprefix("torch.")),
            num_pages=pages,
            max_model_len=max_len,
            budget=PoolBudget(pages * PAGE, 1.0, "decode"),
            plan=MemoryPlan(0, 0),
            draft=serving_draft,
        )
        self.runner = ModelRunner(model, self.pool, StepAttention(self.pool, model.config.sliding_windows))
        draft_runner = serving_draft.runner(self.draft_pool, StepAttention)
        assert isinstance(draft_runner, DraftRunner)
        self.draft_runner = draft_runner
        eager = prompt_graphs.DraftPrefillPlan(self.runner, PhaseSwitch("none"), CHUNK)
        self._draft_prefill = prompt_graphs.draft_head_graphs(draft_runner, pair.draft, eager).forward
        self.space = PageSpace(PAGE, pages, NoPrefixCache())
        self.rows = BatchRows(rows)
        self.table = PageTable(rows, self.space.pages_for(max_len + behind), self.device)
        self.relay = RelayState.allocate(rows, model.config.vocab_size, self.device, topk)

    def step(self, algorithm: str) -> DecodeSteps:
        """The decode node's own steps for "eagle3" or "none", with captured graphs."""
        cluster = Cluster(
            model=Model(path="bench"),
            kv=Kv(page_size=PAGE),
            decode=DecodeSection(max_running=self.rows.free, graphs=self._graphs),  # type: ignore[arg-type]
            speculation=Speculation(algorithm=algorithm, steps=self.steps),
        )
        draft = self.draft_runner if algorithm != "none" else None
        steps = decode_steps(step_sizes(cluster), self._served, self.runner, draft, self.table, self.relay)
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
        rest = adjustments, OneAxis(), PAGE, self.device, completion
        step = PrefillStep(self.runner, TextEmbeds(), draft, *rest)
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prefills, started = [], []
        for prompt in prompts:
            prefill = PrefillRequest(0, "bench", as_keys(prompt), 0, greedy, "bench", 0.0, 0.0)
            pages = self.space.pages_for(len(prompt) + max_tokens + 2 * (self.steps + 1))
            prefill.lease = self.space.lease(prefill.keys, pages, 0)
            assert prefill.lease is not None, "the pool is too small for this batch"
            prefills.append(prefill)
        while chunks := plan_chunks(prefills, 0.0, CHUNK, len(prefills)):
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
        self.relay.write_row(request.row, [*request.prompt, first], 1, request.sampling, draft)
        return request

    def end(self, requests: Sequence[DecodeRequest]) -> None:
        """Release rows and pages; nothing may be in flight."""
        for request in requests:
            assert request.lease is not None
            request.lease.release()
            self.rows.give(request.row)


def random_prompts(pair: Pair, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that end in different tokens; a constructed target's text depends only on that token."""
    draw = random.Random(seed)
    last = draw.sample(range(pair.first_id, pair.model.config.vocab_size), count)
    ids = range(pair.first_id, pair.model.config.vocab_size)
    return [[*draw.choices(ids, k=length - 1), end] for end in last]
