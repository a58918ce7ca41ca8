"""Drafts by a separate small language model: a greedy chain. It reads nothing from the target and keeps only KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.rules import Phase
from common.engine.graphs.slots import Inputs, Slot
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.speculative.rounds import (
    NOTHING,
    Nothing,
    PhaseForward,
    Round,
    RoundCall,
    RoundPhase,
    Rounds,
)
from decode_node.speculative.state import RoundState


class StandaloneDrafter:
    """Proposes chains of `steps` drafts. It also reads the last draft, for its KV, as all drafts may be accepted."""

    hidden_mode = CaptureHiddenMode.NULL
    slots: Sequence[Slot[RoundCall]] = ()

    def __init__(self, runner: ModelRunner, rounds: Rounds, steps: int) -> None:
        self._runner = runner
        self.nodes = self.lookahead_slots = steps + 1
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device)
        # Read inside the draft graph, so that the draft continues after forced tokens and keeps their KV; -1: none.
        self._forced = torch.full((rounds.max_rows, steps), -1, dtype=torch.int64, device=rounds.device)
        self._draft = rounds.phase(
            Phase.DRAFT, "draft", self._run_draft, NOTHING, PhaseForward(ForwardMode.DECODE)
        )
        self.phases: Sequence[RoundPhase[Nothing]] = (self._draft,)

    def propose(self, call: RoundCall) -> None:
        if call.forced is None:
            self._draft(call)
            return
        forced = self._forced[: len(call.forced)]
        forced.copy_(call.forced)
        self._draft(call)
        forced.fill_(-1)

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        return self.state.drafts(call.placed.shape[0])

    def fill(self, batch: Round, inputs: Inputs) -> None:
        """No-op: `propose` has already filled the tree."""

    def draft_extend(self, call: RoundCall) -> None:
        """No-op: the KV of accepted drafts is in place, and that of rejected ones is overwritten."""

    def _run_draft(self, batch: Round, inputs: Inputs, variant: str) -> Nothing:
        *drafting, last = batch.singles(self.nodes)
        drafts = [batch.last_token]
        forced = self._forced[: batch.count]
        for step, forward in enumerate(drafting):
            forward.input_ids = drafts[-1]
            own = self._runner(forward).logits.argmax(-1)
            drafts.append(torch.where(forced[:, step] >= 0, forced[:, step], own))
        self._runner(replace(last, input_ids=drafts[-1], logits_rows=last.logits_rows[:0]))
        self.state.tree.first(batch.count).tokens.copy_(torch.stack(drafts, dim=1))
        return Nothing()


class WindowExtend:
    """Runs the draft over all tokens of a round that it has not drafted, which keeps their KV."""

    def __init__(self, runner: ModelRunner, rounds: Rounds, state: RoundState) -> None:
        self._runner = runner
        self._state = state
        self.phase = rounds.phase(
            Phase.DRAFT_EXTEND,
            "draft",
            self._run,
            NOTHING,
            PhaseForward(ForwardMode.VERIFY, state.tree.tokens.shape[1]),
        )

    def _run(self, batch: Round, inputs: Inputs, variant: str) -> Nothing:
        """Store the KV of the whole window; that of rejected tokens is overwritten before it is read."""
        tree, walk = self._state.tree.first(batch.count), self._state.walk.first(batch.count)
        before = replace(batch, seq_len=walk.start)
        self._runner(before.window(tree.tokens, tree.depth, tree.mask, batch.index[:0]))
        return Nothing()


def make_forced_chain(setup: DrafterSetup, width: int) -> ForcedChain:
    """Build chains of up to `width` forced tokens, which the draft reads after verification."""
    runner, rounds = setup.runner, setup.rounds
    assert isinstance(runner, ModelRunner)
    state = RoundState.allocate(rounds.max_rows, width + 1, width + 1, rounds.device)
    extend = WindowExtend(runner, rounds, state).phase
    return ForcedChain(rounds, width, state, skipped=setup.steps, extend=(extend,))


def make_drafter(setup: DrafterSetup) -> StandaloneDrafter:
    assert isinstance(setup.runner, ModelRunner)
    return StandaloneDrafter(setup.runner, setup.rounds, setup.steps)
