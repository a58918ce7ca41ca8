"""Whether a phase of a node runs under graphs, decided at start-up as data (rows B2, B3, A10; settlements X1, X8).

Order, the first that applies decides:

    1. the role has no such phase: never captured, warmed up or budgeted, whatever else is set (A10, rule 13 by X1)
    2. enforce: on, whatever the rules and the switch say (B2; a testing switch)
    3. the switch of this phase: `none` is off; each phase has its own (X8)
    4. the sixteen rules: any one that applies is off, with its reason

A draft is never captured piecewise, whatever is enforced: it keeps breakable graphs (B5, X2). The encoder of images is
captured full or not at all.

Rules about things that tandem does not have are in the table too: `unsupported` names what a config asks for in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.cuda_graph.backends.choice import BREAKABLE, FULL, NONE, PIECEWISE, RECORDING_DEVICES


class Phase(StrEnum):
    """One kind of captured forward."""

    PREFILL = "prefill"
    DRAFT_PREFILL = "draft_prefill"
    ENCODER = "encoder"  # of images, in front of a prompt
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"


# role of a node, as NodeRef spells it -> the phases that exist there
PHASES = {
    "prefill": frozenset((Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.ENCODER)),
    "decode": frozenset((Phase.DECODE, Phase.VERIFY, Phase.DRAFT, Phase.DRAFT_EXTEND)),
}
DENIED_ARCHITECTURES: frozenset[str] = frozenset()  # whose forward cannot be captured
MULTIMODAL_ALLOWED = frozenset(
    ("LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
)  # X4: architectures whose embeddings go through the slot


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What the rules look at. A plain tandem node has the defaults."""

    role: str
    device: str  # torch's device type
    architecture: str = ""
    attention_data_parallel: bool = False
    torch_compile: bool = False
    pipeline_stages: int = 1
    moe_all_to_all: str = "none"
    lora: bool = False
    multimodal: bool = False
    weights: str = "safetensors"
    diffusion: bool = False
    offloaded_gib: float = 0.0
    hierarchical_cache: bool = False
    deterministic: bool = False
    symmetric_memory: bool = False
    expert_recorder: bool = False
    context_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition of row B3. `exists`: tandem has such a thing, so the rule only turns graphs off."""

    number: int
    name: str
    applies: Callable[[StartupFacts], bool] = field(repr=False)
    reason: str
    exists: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        1,
        "architecture",
        lambda f: f.architecture in DENIED_ARCHITECTURES,
        "the model's forward cannot be captured",
        exists=True,
    ),
    Rule(
        2, "dp_attention", lambda f: f.attention_data_parallel, "ranks of data parallel attention must agree"
    ),
    Rule(3, "torch_compile", lambda f: f.torch_compile, "torch.compile captures graphs of its own"),
    Rule(
        4,
        "pipeline",
        lambda f: f.pipeline_stages > 1,
        "a pipeline stage exchanges activations with its peers",
    ),
    Rule(
        5,
        "device",
        lambda f: f.device not in RECORDING_DEVICES,
        "neither CUDA graphs nor the tape exist on this device",
        exists=True,
    ),
    Rule(
        6,
        "moe_all_to_all",
        lambda f: f.moe_all_to_all != "none",
        "the all-to-all of experts cannot be captured",
    ),
    Rule(7, "lora", lambda f: f.lora, "adapters change from batch to batch"),
    Rule(
        8,
        "multimodal",
        lambda f: f.multimodal and f.architecture not in MULTIMODAL_ALLOWED,
        "this multimodal model is not on the allow-list of embeddings through the slot",
        exists=True,
    ),
    Rule(9, "gguf", lambda f: f.weights == "gguf", "GGUF weights are unpacked during the forward"),
    Rule(10, "diffusion", lambda f: f.diffusion, "a diffusion model has no extend forward of one pass"),
    Rule(
        11,
        "offload",
        lambda f: f.offloaded_gib > 0 or f.hierarchical_cache,
        "weights or pages are moved from the host during the forward",
    ),
    Rule(
        12, "deterministic", lambda f: f.deterministic, "deterministic kernels depend on the real batch size"
    ),
    Rule(13, "role", lambda f: f.role not in PHASES, "this role has no phases of its own", exists=True),
    Rule(
        14, "symmetric_memory", lambda f: f.symmetric_memory, "symmetric buffers are registered per forward"
    ),
    Rule(15, "expert_recorder", lambda f: f.expert_recorder, "expert loads are counted on the host"),
    Rule(
        16, "context_parallel", lambda f: f.context_parallel > 1, "a prompt is split over ranks by its length"
    ),
)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PhaseSwitch:
    """What the config says about one phase."""

    backend: str = AUTO  # auto | none | full | breakable | piecewise
    enforce: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What one phase runs under, and why not something else. `exists` False: nothing may be allocated for it."""

    phase: Phase
    backend: str
    reasons: tuple[str, ...] = ()
    exists: bool = True


def decide(phase: Phase, facts: StartupFacts, switch: PhaseSwitch) -> Decision:
    """Pure; nothing is changed behind the config's back: the reason stands beside every "none"."""
    if phase not in PHASES.get(facts.role, frozenset()):
        return Decision(phase, NONE, (f"a {facts.role} node has no {phase.value} phase",), exists=False)
    wanted = switch.backend if switch.backend not in (AUTO, NONE) else default_backend(phase)
    instead: tuple[str, ...] = ()
    if phase is Phase.ENCODER:  # no lengths for a break to read: one size, or runs found on the device
        wanted = FULL
    if wanted == PIECEWISE and phase is not Phase.PREFILL:
        wanted, instead = default_backend(phase), (f"{PIECEWISE}: of the target's prompts alone",)
    if switch.enforce:
        return Decision(phase, wanted, ("enforced", *instead))
    if switch.backend == NONE:
        return Decision(phase, NONE, (f"graphs.{phase.value} is none",))
    reasons = tuple(f"{rule.name}: {rule.reason}" for rule in RULES if rule.applies(facts))
    return Decision(phase, NONE, reasons) if reasons else Decision(phase, wanted, instead)


def default_backend(phase: Phase) -> str:
    """Prompts are any mix of lengths, so attention is a break; nothing else asks the host for lengths."""
    return BREAKABLE if phase in (Phase.PREFILL, Phase.DRAFT_PREFILL) else FULL


def unsupported(facts: StartupFacts) -> list[Rule]:
    """Rules that apply because of something tandem does not have: build refuses the config with their names."""
    return [rule for rule in RULES if not rule.exists and rule.applies(facts)]


def legacy_switches(disable_cuda_graph: bool) -> dict[Phase, PhaseSwitch]:
    """The one flag of old configs means decode graphs alone (X8, A10)."""
    off = PhaseSwitch(NONE) if disable_cuda_graph else PhaseSwitch()
    return {phase: off if phase in PHASES["decode"] else PhaseSwitch() for phase in Phase}
