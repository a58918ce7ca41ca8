"""Whether a phase of a node runs under graphs, decided at start-up as data (rows B2, B3, A10; settlements X1, X8).

Order, the first that applies decides:

    1. enforce: on, whatever the rules and the switch say (B2; a testing switch)
    2. the switch of this phase: `none` is off; each node has its own (X8)
    3. the rules below: any one that applies is off, with its reason

A draft is never captured piecewise, whatever is enforced: it keeps breakable graphs (B5, X2). The encoder of images is
captured full or not at all. A phase that a role lacks is never asked for: its node is not composed of it (A10, and
rule 13 by X1).

Of the sixteen rules of row B3 those are below that a served model can meet. The others refuse what meets them, by name:
a checkpoint of an architecture, with a vision part or with weights that the model code does not know (1, 8, 9), and
options of things that tandem does not have (2-7, 9-16), which stand in common/config/foreign.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.graphs.backends.choice import BREAKABLE, FULL, NONE, PIECEWISE

AUTO = "auto"


class Phase(StrEnum):
    """One kind of captured forward."""

    PREFILL = "prefill"
    DRAFT_PREFILL = "draft_prefill"
    ENCODER = "encoder"  # of images, in front of a prompt
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"

    @property
    def section(self) -> str:
        """The section of the config whose key `graphs` decides."""
        of_prompts = self in (Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.ENCODER)
        return "prefill" if of_prompts else "decode"


@dataclass(frozen=True, slots=True)
class PhaseSwitch:
    """What the config says about the graphs of one node."""

    backend: str = AUTO  # auto | none | full | breakable | piecewise
    enforce: bool = False
    poisoned: bool = False  # debug switch of `StaticInputs`


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What the rules look at."""

    device: str  # torch's device type: cpu or cuda
    needs_host: bool = False  # the forward asks the host for lengths at every batch


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition of row B3 that turns graphs off."""

    number: int
    name: str
    applies: Callable[[StartupFacts, PhaseSwitch], bool] = field(repr=False)
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        5,
        "device",
        lambda facts, switch: facts.device == "cpu" and switch.backend == AUTO,
        "auto is off on a CPU, which gains nothing from its tape",
    ),
    Rule(
        8,
        "multimodal",
        lambda facts, switch: facts.needs_host,
        "attention of this vision part asks the host for lengths; on a GPU it does not in float16 and bfloat16 with "
        "heads of a multiple of 8",
    ),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What one phase runs under, and why not something else."""

    phase: Phase
    backend: str
    reasons: tuple[str, ...] = ()


def decide(phase: Phase, facts: StartupFacts, switch: PhaseSwitch) -> Decision:
    """Pure; nothing is changed behind the config's back: the reason stands beside every "none"."""
    wanted = switch.backend if switch.backend not in (AUTO, NONE) else default_backend(phase)
    told: tuple[str, ...] = ()
    if phase is Phase.ENCODER:  # no lengths for a break to read: one size, or runs found on the device
        wanted = FULL
    if wanted == PIECEWISE and phase is not Phase.PREFILL:
        wanted, told = default_backend(phase), (f"{PIECEWISE}: of the target's prompts alone",)
    if switch.poisoned:
        told = (*told, "padding is poisoned")
    if switch.enforce:
        return Decision(phase, wanted, ("enforced", *told))
    if switch.backend == NONE:
        return Decision(phase, NONE, (f"{phase.section}.graphs is none",))
    reasons = tuple(f"{rule.name}: {rule.reason}" for rule in RULES if rule.applies(facts, switch))
    return Decision(phase, NONE, reasons) if reasons else Decision(phase, wanted, told)


def default_backend(phase: Phase) -> str:
    """Prompts are any mix of lengths, so attention is a break; nothing else asks the host for lengths."""
    return BREAKABLE if phase in (Phase.PREFILL, Phase.DRAFT_PREFILL) else FULL
