"""The interface of workers, which execute plans, and their results: tokens per row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.messages.generation import OutputToken
from common.node.hidden_states import StateRows
from common.node.overlap import Completion
from decode_node.step_plan import Masks, StepPlan


class RowTokens(NamedTuple):
    """Tokens of one row in one step."""

    tokens: list[OutputToken | None]  # at least one entry; None if the logits were not finite
    drafted: int = 0  # draft tokens that the step verified
    # The hidden state that each token was drawn from, if the router gets hidden states.
    states: StateRows | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, in the order of the plan's rows."""

    rows: Sequence[RowTokens]
    seconds: float = 0.0  # device time of the step, if it is measured


class Trees(NamedTuple):
    """The drafts of a step, per row of its plan. Node 0, the root, is the row's last token and not listed."""

    tokens: Sequence[Sequence[int]]  # for nodes 1, 2, ...
    parents: Sequence[Sequence[int]]  # node index of each node's parent

    @property
    def nodes(self) -> int:
        """Nodes of each tree, including the root."""
        return len(self.tokens[0]) + 1


class Launched(Protocol):
    """A plan in progress. Call `read` only after `completion`; of a masked step, both only after `Worker.draw`."""

    @property
    def completion(self) -> Completion: ...

    def read(self) -> StepResult: ...


class Worker(Protocol):
    """Executes plans on one or several devices."""

    def apply(self, plan: StepPlan, /) -> Launched:
        """Start everything that the plan contains, in order. A masked step stops before its draws."""
        ...

    def unsaved(self) -> Collection[int]:
        """Return the keys of saves that have been applied and not ended, on any of the devices. Does not wait."""
        ...

    def trees(self) -> Trees:
        """Return the drafts of the latest plan, whose step is masked. Waits for the draft model, not for the target."""
        ...

    def draw(self, masks: Masks, /) -> None:
        """Let the latest plan, whose step is masked, draw its tokens. Nothing may be applied before that."""
        ...
