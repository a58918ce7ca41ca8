"""Who carries plans out, and what comes back: tokens per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.messages.generation import OutputToken
from common.node.overlap import Completion
from decode_node.step_plan import StepPlan


class RowTokens(NamedTuple):
    """Tokens of one row in one step."""

    tokens: list[OutputToken | None]  # None: the logits were not finite; at least one entry
    drafted: int = 0  # draft tokens that the step verified; all tokens but one were drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """In the order of the plan's rows."""

    rows: Sequence[RowTokens]
    seconds: float = 0.0  # of the step on the device, where it is timed


class Launched(Protocol):
    """A plan under way; `read` only after `completion`."""

    @property
    def completion(self) -> Completion: ...

    def read(self) -> StepResult: ...


class Worker(Protocol):
    """Carries plans out on a device, or on several."""

    def apply(self, plan: StepPlan, /) -> Launched:
        """Start everything that the plan says, in its order."""
        ...
