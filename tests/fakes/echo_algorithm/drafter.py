"""The decode node's part of the echo algorithm: drafts are written inside the verify graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Inputs, Slot
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState


class EchoDrafter:
    hidden_mode = CaptureHiddenMode.NULL
    phases: Sequence[RoundPhase[None]] = ()
    slots: Sequence[Slot[RoundCall]] = ()

    def __init__(self, rounds: Rounds, steps: int) -> None:
        self._relay = rounds.relay
        self.nodes = self.lookahead_slots = steps + 1
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device)

    def propose(self, call: RoundCall) -> None:
        """No-op: `fill` writes the drafts."""

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        tokens, parents = self.state.drafts(call.placed.shape[0])
        return self._relay.last_token[call.placed[:, 0], None].expand_as(tokens), parents

    def fill(self, batch: Round, inputs: Inputs) -> None:
        self.state.tree.first(batch.count).tokens[:, 1:] = batch.last_token[:, None]

    def draft_extend(self, call: RoundCall) -> None:
        """No-op: the next round needs no state of this one."""


def make_drafter(setup: DrafterSetup) -> EchoDrafter:
    return EchoDrafter(setup.rounds, setup.steps)
