"""Chains of forced tokens, for steps without a draft phase (decode_node/forced_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.slots import Fill, Inputs, Slot
from common.engine.graphs.spec import Axis
from decode_node.speculative.rounds import Nothing, Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState
from decode_node.step_plan import CARRIED


class ForcedChain:
    """Verifies a chain of tokens of the plan; where those are CARRIED, the first drafts of the relay row.

    Args:
        width: the most tokens of a chain.
        carried: drafts of the relay row that a request without forced tokens verifies.
        skipped: forwards of the draft model that a usual round has and this one does not.
        extend: the draft-extend phase over `state`; empty if the drafter needs none.
    """

    def __init__(
        self,
        rounds: Rounds,
        width: int,
        state: RoundState | None = None,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        carried: int = 0,
        skipped: int = 0,
        extend: Sequence[RoundPhase[Nothing]] = (),
    ) -> None:
        self.nodes = self.lookahead_slots = width + 1
        self.state = state or RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device)
        self.hidden_mode = hidden_mode
        self.carried = carried
        self.skipped = skipped
        self.phases = extend
        self._drafts = rounds.relay.draft.draft_topk_ids
        self.slots: Sequence[Slot[RoundCall]] = (
            # Padding is embedded too, so it must be some token of the vocabulary.
            Slot("drafts", Axis.REQUEST, (width,), torch.int64, lambda call: call.drafts, poison=Fill(1)),
        )

    def propose(self, call: RoundCall) -> None:
        """No-op: the plan and the relay rows have the chains."""

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        assert call.drafts is not None
        _, parents = self.state.drafts(call.placed.shape[0])
        return self._chains(call.placed[:, 0], call.drafts), parents

    def fill(self, batch: Round, inputs: Inputs) -> None:
        self.state.tree.first(batch.count).tokens[:, 1:] = self._chains(batch.rows, inputs["drafts"])

    def draft_extend(self, call: RoundCall) -> None:
        for phase in self.phases:
            phase(call)

    def _chains(self, rows: Tensor, drafts: Tensor) -> Tensor:
        """Return the tokens of rows [R]: `drafts` [R, width], and the relay's where those are CARRIED."""
        if not self.carried:
            return drafts
        first = drafts[:, : self.carried]
        own = self._drafts.index_select(0, rows)[:, : self.carried]
        return torch.cat((torch.where(first == CARRIED, own, first), drafts[:, self.carried :]), dim=1)
