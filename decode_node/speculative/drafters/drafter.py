"""What a drafter is: it fills the trees of a round, and sees what became of them.

In a round, in this order: `propose` (the draft graph), `fill` (the first work inside the verify graph), and after
verify `absorb` (the draft-extend graph). A drafter has the graphs that it needs, and an empty method where it
needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.checkpoint.draft_config import DraftConfig
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Inputs, Slot
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What a drafter is made from."""

    runner: object  # what LoadedDraft.runner gave; None: the algorithm has no draft model
    config: DraftConfig | None
    rounds: Rounds
    steps: int  # drafts in a row
    topk: int  # branches of a tree; 1: a chain
    nodes: int  # of a tree, the root included


class Drafter(Protocol):
    """Proposes the same number of nodes for every request of every round, the root included."""

    @property
    def state(self) -> RoundState:
        """Made by the drafter, since it knows how large its trees are; verify and tests look into it."""
        ...

    @property
    def nodes(self) -> int: ...

    @property
    def reach(self) -> int:
        """KV slots behind a request's length that a round writes, at least `nodes`."""
        ...

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        """What it reads of the target's verify forward."""
        ...

    @property
    def phases(self) -> Sequence[RoundPhase[Any]]:
        """Its own forwards, to be captured."""
        ...

    @property
    def slots(self) -> Sequence[Slot[RoundCall]]:
        """What `fill` reads of the host."""
        ...

    def propose(self, call: RoundCall) -> None:
        """Write the trees to `state`, roots excepted: verify reads them from the relay."""
        ...

    def fill(self, batch: Round, inputs: Inputs) -> None:
        """The same inside the verify graph, for what is known without a draft forward."""
        ...

    def absorb(self, call: RoundCall) -> None:
        """After the round: prepare the relay rows that the next one starts from."""
        ...
