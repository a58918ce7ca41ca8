"""The interface of a worker, which carries out plans and send orders, and the results of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.kv_cache.host_plan import INTACT, Damage
from common.messages.generation import OutputToken, PromptLogprob
from common.node.hidden_states import StateRows
from common.node.overlap import Completion
from kv_transfer.send_order import SendOrder
from prefill_node.step_plan import PromptPlan


class Drawn(NamedTuple):
    """The first output token of a prompt and the draft's state."""

    token: OutputToken | None  # None: the logits were not finite
    draft: DraftRow = NO_DRAFT


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The results of a plan: one entry for each final chunk, in the plan's order."""

    drawn: Sequence[Drawn] = ()
    scores: Sequence[Sequence[PromptLogprob]] = ()  # per chunk; empty if no chunk is scored
    # per chunk: hidden states of its last positions, if it sends any; empty if no chunk does
    states: Sequence[StateRows | None] = ()
    damage: Damage = INTACT  # what was loaded from host memory and is not what was stored
    ms: float | None = None  # what the forward took on the device; None if that was not measured


class Launched(Protocol):
    """A launched plan. `read` may be called only after `completion`."""

    @property
    def completion(self) -> Completion: ...

    def read(self) -> PromptResult: ...


class Worker(Protocol):
    """Carries out plans on one or several devices, and sends pages from there."""

    def apply(self, plan: PromptPlan, /) -> Launched:
        """Launch everything that the plan contains. Send orders for its own pages are requested while it runs."""
        ...

    def granted(self) -> None:
        """Ask again for send orders for pages of the plan that was launched last."""
        ...

    def send(self, order: SendOrder, /) -> None:
        """Send pages of a plan whose results were read."""
        ...
