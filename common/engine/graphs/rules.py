"""Decides at start-up, as data, whether a phase of a node runs under graphs.

The first of these that applies decides:

    1. enforce: on, whatever the rules and the switch say (a switch for tests)
    2. the switch of this phase: `none` is off; each node has its own
    3. the rules below: each rule that applies turns graphs off and states its reason

A draft is never captured piecewise, even if enforced: it keeps breakable graphs. The image encoder is captured full
or not at all. A phase that a role lacks is never decided, because its node does not contain it.

Only conditions that a served model can meet are rules. Other features that graphs could not serve are refused by name
before: checkpoints with an architecture, a vision part or weights that the model code does not know, and options that
tandem does not have (common/config/foreign.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from common.engine.graphs.backends.names import BREAKABLE, FULL, NONE, PIECEWISE

AUTO = "auto"


class Phase(StrEnum):
    """One kind of captured forward."""

    PREFILL = "prefill"
    DRAFT_PREFILL = "draft_prefill"
    ENCODER = "encoder"  # encodes images before the prompt
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"

    @property
    def section(self) -> str:
        """The config section whose key `graphs` selects the backend of this phase."""
        prompt_phase = self in (Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.ENCODER)
        return "prefill" if prompt_phase else "decode"


@dataclass(frozen=True, slots=True)
class PhaseSwitch:
    """The config of one node's graphs."""

    backend: str = AUTO  # auto | none | full | breakable | piecewise
    enforce: bool = False
    poisoned: bool = False  # debug switch of `StaticInputs`


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """The facts that the rules depend on."""

    device: str  # torch's device type: cpu or cuda
    needs_host: bool = False  # the forward asks the host for lengths at every batch


@dataclass(frozen=True, slots=True)
class GraphRule:
    """One condition that turns graphs off."""

    name: str
    applies: Callable[[StartupFacts, PhaseSwitch], bool] = field(repr=False)
    reason: str


RULES: tuple[GraphRule, ...] = (
    GraphRule(
        "device",
        lambda facts, switch: facts.device == "cpu" and switch.backend == AUTO,
        "auto is off on a CPU, where the tape is not faster",
    ),
    GraphRule(
        "multimodal",
        lambda facts, switch: facts.needs_host,
        "attention of this vision part asks the host for lengths; on a GPU it does not in float16 and bfloat16 with "
        "heads of a multiple of 8",
    ),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend of one phase, and the reasons for not using another."""

    phase: Phase
    backend: str
    reasons: tuple[str, ...] = ()


def decide(phase: Phase, facts: StartupFacts, switch: PhaseSwitch) -> Decision:
    """Return the decision; a pure function. Every "none" comes with its reason."""
    wanted = switch.backend if switch.backend not in (AUTO, NONE) else default_backend(phase)
    notes: tuple[str, ...] = ()
    # The encoder has no lengths that a break would have to read: images have one size, or runs are found on the
    # device.
    if phase is Phase.ENCODER:
        wanted = FULL
    if wanted == PIECEWISE and phase is not Phase.PREFILL:
        wanted, notes = default_backend(phase), (f"{PIECEWISE}: only for the target's prompts",)
    if switch.poisoned:
        notes = (*notes, "padding is poisoned")
    if switch.enforce:
        return Decision(phase, wanted, ("enforced", *notes))
    if switch.backend == NONE:
        return Decision(phase, NONE, (f"{phase.section}.graphs is none",))
    reasons = tuple(f"{rule.name}: {rule.reason}" for rule in RULES if rule.applies(facts, switch))
    return Decision(phase, NONE, reasons) if reasons else Decision(phase, wanted, notes)


def default_backend(phase: Phase) -> str:
    """Return the default.

    Prompts mix lengths, so attention is a break; other phases need no lengths from the host.
    """
    return BREAKABLE if phase in (Phase.PREFILL, Phase.DRAFT_PREFILL) else FULL
