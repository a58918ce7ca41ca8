"""The drafter protocol: a drafter fills the draft trees of a round and processes the outcome.

A round calls `propose` (the draft graph), for constrained requests `trees`, `fill` (at the start of the verify graph)
and, after verify, `draft_extend` (the graph of that name), in this order. A drafter implements only the graphs that it
needs; other methods are no-ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Inputs, Slot
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """The parameters of a drafter."""

    runner: object  # from LoadedDraft.runner; None if the algorithm has no draft model
    config: DraftConfig | None
    rounds: Rounds
    steps: int  # length of a draft chain
    topk: int  # branching factor of a tree; 1 for a chain
    nodes: int  # per tree, including the root


class Drafter(Protocol):
    """Proposes the same number of nodes, including the root, for every request of every round."""

    @property
    def state(self) -> RoundState:
        """Device state of the round. The drafter allocates it, because it knows the size of its trees."""
        ...

    @property
    def nodes(self) -> int: ...

    @property
    def lookahead_slots(self) -> int:
        """KV slots past a request's length that a round writes; at least `nodes`."""
        ...

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        """The hidden states that it reads from the target's verify forward."""
        ...

    @property
    def phases(self) -> Sequence[RoundPhase[Any]]:
        """Its own forwards, to be captured."""
        ...

    @property
    def slots(self) -> Sequence[Slot[RoundCall]]:
        """The host inputs that `fill` reads."""
        ...

    def propose(self, call: RoundCall) -> None:
        """Write the draft trees to `state`, except the roots, which verify reads from the relay.

        A request with forced tokens (`RoundCall.forced`) gets a tree whose first nodes are a chain of them.
        """
        ...

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        """Return tokens and parents [R, nodes - 1] int64 of the proposed nodes, the roots left out.

        Called after `propose`, and only if the host needs the drafts for the masks of grammars.
        """
        ...

    def fill(self, batch: Round, inputs: Inputs) -> None:
        """Write, inside the verify graph, the drafts that need no draft forward."""
        ...

    def draft_extend(self, call: RoundCall) -> None:
        """Prepare the relay rows for the next round, after verify."""
        ...
