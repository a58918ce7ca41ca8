"""Who carries plans and send orders out, and what comes back: the first token of each prompt that is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.messages.generation import OutputToken
from common.node.overlap import Completion
from prefill_node.send_orders import SendOrder
from prefill_node.step_plan import PromptPlan


class Drawn(NamedTuple):
    """What a prompt ends with on this node."""

    token: OutputToken | None  # None: the logits were not finite
    draft: DraftRow = NO_DRAFT


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One entry for each final chunk of the plan, in its order."""

    drawn: Sequence[Drawn] = ()


class Launched(Protocol):
    """A plan under way; `read` only after `completion`."""

    @property
    def completion(self) -> Completion: ...

    def read(self) -> PromptResult: ...


class Worker(Protocol):
    """Carries plans out on a device, or on several, and sends pages from there."""

    def apply(self, plan: PromptPlan, /) -> Launched:
        """Start everything that the plan says. Orders for its own pages are taken in while it runs."""
        ...

    def send(self, order: SendOrder, /) -> None:
        """Send pages whose plan has been read."""
        ...
