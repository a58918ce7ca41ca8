"""Copies the drafts that the host found in texts (ngram_texts.py) into the trees of a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Fill, Inputs, Slot
from common.engine.graphs.spec import Axis
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState


class NgramDrafter:
    """Proposes a chain of `steps` drafts per request; the drafts are part of the plan."""

    hidden_mode = CaptureHiddenMode.NULL
    phases: Sequence[RoundPhase[None]] = ()

    def __init__(self, rounds: Rounds, steps: int) -> None:
        self.nodes = self.lookahead_slots = steps + 1
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device)
        self.slots: Sequence[Slot[RoundCall]] = (
            # Padding is embedded too, so it must be some token of the vocabulary.
            Slot("drafts", Axis.REQUEST, (steps,), torch.int64, lambda call: call.drafts, poison=Fill(1)),
        )

    def propose(self, call: RoundCall) -> None:
        """No-op: the drafts are part of the plan."""

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        assert call.drafts is not None
        _, parents = self.state.drafts(call.placed.shape[0])
        return call.drafts, parents

    def fill(self, batch: Round, inputs: Inputs) -> None:
        self.state.tree.first(batch.count).tokens[:, 1:] = inputs["drafts"]

    def draft_extend(self, call: RoundCall) -> None:
        """No-op: an n-gram drafter has no device state."""


def make_drafter(setup: DrafterSetup) -> NgramDrafter:
    return NgramDrafter(setup.rounds, setup.steps)
