"""The graphs of one node: what the config asks for, decided by the rules, captured, and told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from common.draft_config import DraftConfig
from common.engine.cuda_graph.backends.base import Backend
from common.engine.cuda_graph.backends.choice import BREAKABLE, NONE, PIECEWISE, make_backend
from common.engine.cuda_graph.compiled_body import LEAST_TOKENS, CompiledBodies
from common.engine.cuda_graph.decode_graph import DecodeGraphs, decode_spec
from common.engine.cuda_graph.draft_prefill import DraftPrefill, draft_prefill_spec
from common.engine.cuda_graph.graph_runner import GraphRunner
from common.engine.cuda_graph.image_encoder import EncoderGraphs, encoder_spec
from common.engine.cuda_graph.ladders import (
    decode_request_buckets,
    image_buckets,
    image_token_buckets,
    prefill_token_buckets,
    verify_request_buckets,
)
from common.engine.cuda_graph.patch_encoder import PatchEncoderGraphs, patch_spec
from common.engine.cuda_graph.prefill_extend import PrefillExtend, extend_spec
from common.engine.cuda_graph.report import start_report, table
from common.engine.cuda_graph.rules import Decision, Phase, PhaseSwitch, StartupFacts, decide
from common.engine.cuda_graph.spec import ShapeKey
from common.engine.cuda_graph.static_extend import BROKEN, UNBROKEN_TOKENS
from common.engine.draft_runner import DraftRunner
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.kv_cache.page_table import PageTable
from common.engine.kv_cache.relay_state import RelayState
from common.engine.layers.placement import Placement
from common.engine.model_runner import ModelRunner
from common.engine.models.llava import LlavaPart
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import largest_batch
from common.engine.mtp_runner import MultiLayerRunner
from common.messages.identity import GraphReport, GraphTotals
from common.observability.logs import Log

GRAPH_BYTES = 4 << 20  # one graph's nodes, which the driver keeps and torch does not see


class GraphForward(Protocol):
    """A forward that runs under graphs where they fit."""

    graphs: GraphRunner[Any, Any]


Forward = TypeVar("Forward", bound=GraphForward)


@dataclass(frozen=True, slots=True)
class NodeGraphs(Generic[Forward]):
    """`forward` is complete with or without graphs: without, it has no shapes and is always eager."""

    forward: Forward
    decision: Decision


def prefill_graphs(
    runner: ModelRunner,
    wanted: PhaseSwitch,
    chunk_tokens: int,
    max_batch: int,
    hidden: CaptureHiddenMode,
    bodies: CompiledBodies | None = None,
) -> NodeGraphs[PrefillExtend]:
    """The target's prompt forward, not captured yet; returns hidden states of `hidden` and less.

    Args:
        bodies: where piecewise graphs find the model compiled, or leave it for the next ones.
    """
    decision = _decide(Phase.PREFILL, runner.model.placement, wanted)
    on = decision.backend != NONE
    backend = make_backend(decision.backend if on else BREAKABLE, runner.model.placement.device, bodies)
    unbroken = ShapeKey(UNBROKEN_TOKENS, max_batch) if on else BROKEN
    buckets = prefill_token_buckets(chunk_tokens) if on else ()
    if decision.backend == PIECEWISE:  # one token replays as two
        buckets = tuple(dict.fromkeys(max(each, LEAST_TOKENS) for each in buckets))
    spec = extend_spec(buckets, hidden, unbroken=unbroken)
    return NodeGraphs(PrefillExtend(runner, spec, backend, wanted.poisoned, unbroken), decision)


@dataclass(frozen=True, slots=True)
class DraftPrefillPlan:
    """What all prompt forwards of a draft have in common."""

    target: ModelRunner
    wanted: PhaseSwitch
    chunk_tokens: int

    @property
    def decision(self) -> Decision:
        return _decide(Phase.DRAFT_PREFILL, self.target.model.placement, self.wanted)

    def backend(self) -> Backend:
        """With a memory pool of its own."""
        name = self.decision.backend
        return make_backend(name if name != NONE else BREAKABLE, self.target.model.placement.device)

    def buckets(self, more: int = 0) -> tuple[int, ...]:
        """Token buckets of chunks with up to `more` rows before them; (): always eager."""
        return prefill_token_buckets(self.chunk_tokens, more) if self.decision.backend != NONE else ()


def draft_model_graphs(draft: ModelRunner, plan: DraftPrefillPlan) -> NodeGraphs[PrefillExtend]:
    """The prompt forward of a draft that is a language model, not captured yet."""
    spec = extend_spec(plan.buckets(), CaptureHiddenMode.NULL, model="draft")
    return NodeGraphs(PrefillExtend(draft, spec, plan.backend(), plan.wanted.poisoned), plan.decision)


def draft_head_graphs(
    draft: DraftRunner, config: DraftConfig, plan: DraftPrefillPlan
) -> NodeGraphs[DraftPrefill]:
    """The prompt forward of a head that reads the target's hidden states, not captured yet."""
    spec, page_size = draft_prefill_spec(plan.buckets()), plan.target.pool.page_size
    forward = DraftPrefill(draft, config, page_size, spec, plan.backend(), plan.wanted.poisoned)
    return NodeGraphs(forward, plan.decision)


def draft_module_graphs(
    draft: MultiLayerRunner, config: DraftConfig, plan: DraftPrefillPlan
) -> list[NodeGraphs[DraftPrefill]]:
    """The prompt forward of each module, not captured yet."""
    page_size, modules = plan.target.pool.page_size, []
    for step, module in enumerate(draft.modules):
        spec = draft_prefill_spec(plan.buckets(step), f"draft-{step}")
        forward = DraftPrefill(module, config, page_size, spec, plan.backend(), plan.wanted.poisoned)
        modules.append(NodeGraphs(forward, plan.decision))
    return modules


def encoder_graphs(
    part: LlavaPart | QwenPart, wanted: PhaseSwitch
) -> NodeGraphs[EncoderGraphs | PatchEncoderGraphs]:
    """The vision part of a model, not captured yet."""
    needs_host = isinstance(part, QwenPart) and not part.runs_on_device
    decision = _decide(Phase.ENCODER, part.placement, wanted, needs_host)
    on = decision.backend != NONE
    backend = make_backend(decision.backend, part.placement.device)
    if isinstance(part, QwenPart):
        patches = patch_spec(image_token_buckets() if on else ())
        return NodeGraphs(PatchEncoderGraphs(part, patches, backend, wanted.poisoned), decision)
    tokens = part.config.tokens_per_image
    spec = encoder_spec(image_buckets(largest_batch(tokens)) if on else (), tokens)
    return NodeGraphs(EncoderGraphs(part, spec, backend, wanted.poisoned), decision)


def decode_graphs(
    runner: ModelRunner,
    relay: RelayState,
    page_table: PageTable,
    wanted: PhaseSwitch,
    max_running: int,
    max_model_len: int,
) -> NodeGraphs[DecodeGraphs]:
    """The target's decode step, not captured yet."""
    decision = _decide(Phase.DECODE, runner.model.placement, wanted)
    spec = decode_spec(decode_request_buckets(max_running) if decision.backend != NONE else ())
    backend = make_backend(decision.backend, runner.model.placement.device)
    forward = DecodeGraphs(runner, relay, page_table, spec, backend, max_model_len, wanted.poisoned)
    return NodeGraphs(forward, decision)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """What one phase of a speculating node is captured as."""

    decision: Decision
    buckets: tuple[int, ...]  # requests; (): always eager
    device: torch.device
    poisoned: bool = False  # debug switch of `StaticInputs`

    def backend(self) -> Backend:
        """With a memory pool of its own."""
        return make_backend(self.decision.backend, self.device)


def round_plans(
    runner: ModelRunner, wanted: PhaseSwitch, max_running: int, min_running: int = 1
) -> Callable[[Phase], PhasePlan]:
    """Draft, verify and draft-extend of a decode node, each a full graph of its own, decided each on its own.

    For batches of `min_running` to `max_running` requests.
    """

    def plan(phase: Phase) -> PhasePlan:
        decision = _decide(phase, runner.model.placement, wanted)
        ladder = verify_request_buckets(max_running) if decision.backend != NONE else ()
        buckets = tuple(count for count in ladder if count >= min_running)
        return PhasePlan(decision, buckets, runner.model.placement.device, wanted.poisoned)

    return plan


def capture(node: NodeGraphs[Any], log: Log) -> None:
    """Capture all shapes; one that failed is logged with its reason, and runs eagerly, for the first time here.

    Under inductor nothing else has run our own kernels by then: they would compile at the first request.
    """
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    graphs.capture()
    if graphs.rows:
        log.debug("captured shapes", table=table(graphs.rows, graphs.compilation))
    told = report(node)
    if told.failed:
        log.warning("graphs not captured", phase=told.phase, model=told.model, failed=told.failed)
    graphs.run_missing()  # behind the log: where the eager run fails too, the capture's error tells more


def trial(build: Callable[[], Iterable[NodeGraphs[Any]]], reserved: Callable[[], int]) -> int:
    """Bytes that the graphs of `build` will take, with their static inputs. They are let go of again.

    The largest shape of each is captured, which sizes its pool, and one more, which the others are taken to be like.
    Raises torch.OutOfMemoryError where these do not fit.

    Args:
        reserved: bytes of the device that something alive lies in.
    """
    before = reserved()
    nodes = list(build())
    more = 0
    for node in nodes:
        runner: GraphRunner[Any, Any] = node.forward.graphs
        shapes = runner.spec.shapes
        runner.capture(shapes[-1:])
        largest = reserved()
        runner.capture(shapes[-2:-1])
        for row in runner.rows:
            if row.ran_out:
                raise torch.OutOfMemoryError(f"{row.phase} of {row.tokens} tokens: {row.error}")
        more += (reserved() - largest) * max(0, len(shapes) - 2)
        more += GRAPH_BYTES * len(shapes) * len(runner.spec.variants)
    return reserved() - before + more


def totals(*nodes: NodeGraphs[Any]) -> Callable[[], tuple[GraphTotals, ...]]:
    """What these forwards of one node have run, asked anew each time: one entry for each phase and model."""
    runners: list[GraphRunner[Any, Any]] = [node.forward.graphs for node in nodes]

    def now() -> tuple[GraphTotals, ...]:
        found: dict[tuple[str, str], GraphTotals] = {}
        for each in (runner.totals() for runner in runners):
            before = found.get((each.phase, each.model))
            found[each.phase, each.model] = each if before is None else _both(before, each)
        return tuple(found.values())

    return now


def _both(one: GraphTotals, other: GraphTotals) -> GraphTotals:
    """The same phase in two widths."""
    return GraphTotals(
        phase=one.phase,
        model=one.model,
        replays=one.replays + other.replays,
        fallbacks=dict(Counter(one.fallbacks) + Counter(other.fallbacks)),
        live_tokens=one.live_tokens + other.live_tokens,
        padded_tokens=one.padded_tokens + other.padded_tokens,
        captured=one.captured + other.captured,
        unused=one.unused + other.unused,
    )


def report(node: NodeGraphs[Any]) -> GraphReport:
    """Its row of the start-up table and of /server_info."""
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    decision = node.decision
    return start_report(graphs.spec, decision.backend, decision.reasons, graphs.rows, graphs.compilation)


def _decide(phase: Phase, placement: Placement, wanted: PhaseSwitch, needs_host: bool = False) -> Decision:
    return decide(phase, StartupFacts(placement.device.type, needs_host), wanted)
