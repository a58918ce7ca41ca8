"""Drafts that the host found in texts (ngram_texts.py), on their way into the trees of a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Fill, Inputs, Slot
from common.engine.graphs.spec import Axis
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState


class NgramDrafter:
    """A chain of `steps` drafts per request, which the plan brings."""

    hidden_mode = CaptureHiddenMode.NULL
    phases: Sequence[RoundPhase[None]] = ()

    def __init__(self, rounds: Rounds, steps: int) -> None:
        self.nodes = self.reach = steps + 1
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device)
        self.slots: Sequence[Slot[RoundCall]] = (
            # padding is embedded too: any token of the vocabulary will do
            Slot("drafts", Axis.REQUEST, (steps,), torch.int64, lambda call: call.drafts, poison=Fill(1)),
        )

    def propose(self, call: RoundCall) -> None:
        """No-op: the plan has brought the drafts."""

    def fill(self, batch: Round, inputs: Inputs) -> None:
        self.state.tree.first(batch.count).tokens[:, 1:] = inputs["drafts"]

    def absorb(self, call: RoundCall) -> None:
        """No-op: it keeps nothing on the device."""


def make_drafter(setup: DrafterSetup) -> NgramDrafter:
    return NgramDrafter(setup.rounds, setup.steps)
