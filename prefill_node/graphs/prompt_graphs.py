"""Builds what a prefill node captures: prompt forwards of the target and of each draft, and image encoders."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.checkpoint.draft_config import DraftConfig, module_input_for
from common.engine.encoder_sizes import largest_batch
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.names import BREAKABLE, NONE, PIECEWISE
from common.engine.graphs.ladders import (
    image_buckets,
    image_token_buckets,
    prefill_token_buckets,
)
from common.engine.graphs.node_graphs import NodeGraphs, decided
from common.engine.graphs.rules import Decision, Phase, PhaseSwitch
from common.engine.graphs.spec import ShapeKey
from common.engine.layers.placement import Placement
from common.engine.models.llava import LlavaPart
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import LoadedVisionPart
from prefill_node.graphs.backends.choice import prompt_backend
from prefill_node.graphs.backends.compiled_body import MIN_TOKENS, CompiledBodies
from prefill_node.graphs.draft_prefill import DraftPrefill, draft_prefill_spec
from prefill_node.graphs.image_encoder import EncoderGraphs, encoder_spec
from prefill_node.graphs.patch_encoder import PatchEncoderGraphs, patch_spec
from prefill_node.graphs.prefill_extend import PrefillExtend, extend_spec
from prefill_node.graphs.static_extend import BROKEN, UNBROKEN_TOKENS
from prefill_node.vision_table import EncoderForward, vision_family


def unbroken_tokens(placement: Placement, wanted: PhaseSwitch, on_device: int = 0) -> int:
    """Return up to how many tokens the graphs of the target's prompt forward have no breaks.

    Args:
        on_device: up to how many tokens breakable graphs need none, if that is more than UNBROKEN_TOKENS: attention
            makes no decision on the host, and nothing is sent or awaited between layers.
    """
    backend = decided(Phase.PREFILL, placement, wanted).backend
    if backend == NONE:
        return BROKEN.tokens
    return max(UNBROKEN_TOKENS, on_device) if backend == BREAKABLE else UNBROKEN_TOKENS


def prefill_graphs(
    runner: ModelRunner,
    wanted: PhaseSwitch,
    chunk_tokens: int,
    max_batch: int,
    hidden: CaptureHiddenMode,
    bodies: CompiledBodies | None = None,
    on_device: int = 0,
) -> NodeGraphs[PrefillExtend]:
    """Build the target's prompt forward, not captured yet. It returns hidden states up to mode `hidden`.

    Args:
        bodies: cache of compiled models for piecewise graphs.
        on_device: see `unbroken_tokens`.
    """
    decision = decided(Phase.PREFILL, runner.model.placement, wanted)
    on, few = decision.backend != NONE, unbroken_tokens(runner.model.placement, wanted, on_device)
    backend = prompt_backend(decision.backend if on else BREAKABLE, runner.model.placement.device, bodies)
    unbroken = ShapeKey(few, max_batch) if few else BROKEN
    buckets = prefill_token_buckets(chunk_tokens) if on else ()
    if decision.backend == PIECEWISE:  # one token replays as two tokens
        buckets = tuple(dict.fromkeys(max(each, MIN_TOKENS) for each in buckets))
    spec = extend_spec(buckets, hidden, unbroken=unbroken)
    return NodeGraphs(PrefillExtend(runner, spec, backend, wanted.poisoned, unbroken), decision)


@dataclass(frozen=True, slots=True)
class DraftPrefillPlan:
    """Parameters shared by all prompt forwards of a draft."""

    target: ModelRunner
    wanted: PhaseSwitch
    chunk_tokens: int

    @property
    def decision(self) -> Decision:
        return decided(Phase.DRAFT_PREFILL, self.target.model.placement, self.wanted)

    def backend(self) -> Backend:
        """Create a capture backend with its own memory pool."""
        name = self.decision.backend
        return prompt_backend(name if name != NONE else BREAKABLE, self.target.model.placement.device)

    def buckets(self, more: int = 0) -> tuple[int, ...]:
        """Return the token buckets for chunks with up to `more` rows before them; empty means always eager."""
        return prefill_token_buckets(self.chunk_tokens, more) if self.decision.backend != NONE else ()


def draft_model_graphs(draft: ModelRunner, plan: DraftPrefillPlan) -> NodeGraphs[PrefillExtend]:
    """Build the prompt forward of a draft that is a language model, not captured yet."""
    spec = extend_spec(plan.buckets(), CaptureHiddenMode.NULL, model="draft")
    return NodeGraphs(PrefillExtend(draft, spec, plan.backend(), plan.wanted.poisoned), plan.decision)


def draft_head_graphs(
    draft: DraftRunner, config: DraftConfig, plan: DraftPrefillPlan
) -> NodeGraphs[DraftPrefill]:
    """Build the prompt forward of a head that reads the target's hidden states, not captured yet."""
    spec, page_size = draft_prefill_spec(plan.buckets()), plan.target.pool.page_size
    forward = DraftPrefill(draft, config, page_size, spec, plan.backend(), plan.wanted.poisoned)
    return NodeGraphs(forward, plan.decision)


def draft_module_graphs(
    draft: MtpRunner, config: DraftConfig, plan: DraftPrefillPlan
) -> list[NodeGraphs[DraftPrefill]]:
    """Build the prompt forward of each module, not captured yet."""
    page_size, modules = plan.target.pool.page_size, []
    for step, module in enumerate(draft.modules):
        spec = draft_prefill_spec(plan.buckets(step), f"draft-{step}")
        reads = replace(config, target_hidden=module_input_for(config, step))
        forward = DraftPrefill(module, reads, page_size, spec, plan.backend(), plan.wanted.poisoned)
        modules.append(NodeGraphs(forward, plan.decision))
    return modules


def encoder_graphs(part: LoadedVisionPart, wanted: PhaseSwitch) -> NodeGraphs[EncoderForward]:
    """Build the graphs of a model's vision part, not captured yet."""
    decision = decided(Phase.ENCODER, part.placement, wanted, not part.runs_on_device)
    backend = prompt_backend(decision.backend, part.placement.device)
    family = vision_family(part.config.family)
    return NodeGraphs(family.graphs(part, backend, decision.backend != NONE, wanted.poisoned), decision)


def image_graphs(part: LlavaPart, backend: Backend, captured: bool, poisoned: bool) -> EncoderGraphs:
    """Build the forward of a tower over images of one size, with shapes by their number if `captured`."""
    tokens = part.config.tokens_per_image
    spec = encoder_spec(image_buckets(largest_batch(tokens)) if captured else (), tokens)
    return EncoderGraphs(part, spec, backend, poisoned)


def patch_graphs(part: QwenPart, backend: Backend, captured: bool, poisoned: bool) -> PatchEncoderGraphs:
    """Build the forward of a tower over images of any size, with shapes by their tokens if `captured`."""
    patches = patch_spec(image_token_buckets() if captured else ())
    return PatchEncoderGraphs(part, patches, backend, poisoned)
