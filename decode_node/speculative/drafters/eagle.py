"""Drafts by an EAGLE head: a draft phase that starts from the head's hidden states, and an extend phase after verify.

State between rounds is kept in the relay rows: the first level of drafts (proposed by the extend phase of the previous
round, or by the prefill node) and the hidden state from which the second level starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.draft_inputs import DraftExtendInput, DraftInput, TreeVerifyInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.graphs.rules import Phase
from common.engine.graphs.slots import Inputs, Slot
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.eagle_tree import TreeGrowth
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
from decode_node.speculative.tree import replace_drafts


class Growth(Protocol):
    """The shape of a head's drafts and the steps that compute them, all in one graph."""

    @property
    def steps(self) -> int:
        """Maximum number of drafts on a path."""
        ...

    @property
    def nodes(self) -> int: ...
    @property
    def lookahead_slots(self) -> int: ...
    @property
    def mode(self) -> ForwardMode:
        """The mode of its forwards."""
        ...

    def grow(self, batch: Round, start: DraftInput, tree: TreeVerifyInput) -> None:
        """Fill all of `tree` [R, N] except its roots."""
        ...

    def force(self, forced: Tensor, tree: TreeVerifyInput) -> None:
        """Put forced [R, N - 1], as in RoundCall, in the place of drafts of `tree` [R, N]."""
        ...


class ChainGrowth:
    """A chain of `steps` drafts, possibly 0. Depth and mask of `tree` are initialized to a chain and never change."""

    mode = ForwardMode.DECODE

    def __init__(self, runner: DraftRunner, steps: int) -> None:
        self._runner = runner
        self.steps = steps
        self.nodes = self.lookahead_slots = steps + 1

    def grow(self, batch: Round, start: DraftInput, tree: TreeVerifyInput) -> None:
        """Step i reads draft i at position seq_len + i - 1. The first draft needs no step."""
        if not self.steps:
            return
        state, drafts = start, [start.draft_topk_ids[:, 0]]
        for forward in batch.singles(self.steps - 1):
            forward.input_ids = drafts[-1]
            state = self._runner.step(forward, state.hidden)
            drafts.append(state.draft_topk_ids[:, 0])
        tree.tokens[:, 1:] = torch.stack(drafts, dim=1)

    def force(self, forced: Tensor, tree: TreeVerifyInput) -> None:
        replace_drafts(tree.tokens[:, 1:], forced)


class EagleDrafter:
    """The draft and draft-extend phases of one EAGLE head.

    Args:
        target_hidden: hidden values per token that the head reads from the target
            (DraftExtendInput.hidden_size_for).
    """

    hidden_mode = CaptureHiddenMode.FULL
    slots: Sequence[Slot[RoundCall]] = ()

    def __init__(self, runner: DraftRunner, rounds: Rounds, growth: Growth, target_hidden: int) -> None:
        self._relay = rounds.relay
        self._growth = growth
        self.nodes, self.lookahead_slots = growth.nodes, growth.lookahead_slots
        widths = target_hidden, rounds.relay.draft.hidden.dtype
        self.state = RoundState.allocate(
            rounds.max_rows, growth.nodes, growth.steps + 1, rounds.device, *widths
        )
        self._draft = rounds.phase(
            Phase.DRAFT,
            "draft",
            self._run_draft,
            NOTHING,
            PhaseForward(growth.mode, hidden=DraftInput.hidden_mode),
        )
        self._extend = HeadExtend(runner, rounds, self.state).phase
        self.phases: Sequence[RoundPhase[Nothing]] = (self._draft, self._extend)

    def propose(self, call: RoundCall) -> None:
        self._draft(call)
        if call.forced is not None:
            self._growth.force(call.forced, self.state.tree.first(len(call.forced)))

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        return self.state.drafts(call.placed.shape[0])

    def fill(self, batch: Round, inputs: Inputs) -> None:
        """No-op: `propose` has already filled the tree."""

    def draft_extend(self, call: RoundCall) -> None:
        self._extend(call)

    def _run_draft(self, batch: Round, inputs: Inputs, variant: str) -> Nothing:
        start = self._relay.draft_input(batch.rows)
        self._growth.grow(batch, start, self.state.tree.first(batch.count))
        return Nothing()


class HeadExtend:
    """The draft-extend phase of one EAGLE head over the window of `state.walk`."""

    def __init__(self, runner: DraftRunner, rounds: Rounds, state: RoundState) -> None:
        self._runner = runner
        self._relay = rounds.relay
        self._walk = state.walk
        window = state.walk.ids.shape[1]
        self._chains = TreeVerifyInput.zeros(rounds.max_rows, window, rounds.device)
        self.phase = rounds.phase(
            Phase.DRAFT_EXTEND,
            "draft",
            self._run,
            NOTHING,
            PhaseForward(ForwardMode.VERIFY, window, DraftExtendInput.hidden_mode),
        )

    def _run(self, batch: Round, inputs: Inputs, variant: str) -> Nothing:
        """Run the head over the tokens of the round, with the target's hidden states and the tokens that it drew."""
        walk, chain = self._walk.first(batch.count), self._chains.first(batch.count)
        window = walk.ids.shape[1]
        before = replace(batch, seq_len=walk.start)
        select = batch.index[: batch.count] * window + walk.accepted
        forward = before.window(walk.ids, chain.depth, chain.mask, select)
        self._relay.write_draft(batch.rows, self._runner.extend(forward, walk.hidden.flatten(0, 1)))
        return Nothing()


def make_drafter(setup: DrafterSetup) -> EagleDrafter:
    """Build a drafter of chains of `steps` drafts, or of trees of `nodes`."""
    draft = setup.runner
    assert isinstance(draft, DraftRunner)
    assert setup.config is not None
    growth: Growth = ChainGrowth(draft, setup.steps)
    if setup.topk > 1:
        growth = TreeGrowth(draft, setup.steps, setup.topk, setup.nodes)
    return EagleDrafter(draft, setup.rounds, growth, DraftExtendInput.hidden_size_for(setup.config))


def make_forced_chain(setup: DrafterSetup, width: int) -> ForcedChain:
    """Build chains of up to `width` forced tokens, after which the head drafts as usual.

    A request without forced tokens verifies the likeliest draft of the previous round's extend phase.
    """
    draft, rounds = setup.runner, setup.rounds
    assert isinstance(draft, DraftRunner)
    assert setup.config is not None
    hidden = DraftExtendInput.hidden_size_for(setup.config)
    widths = hidden, rounds.relay.draft.hidden.dtype
    state = RoundState.allocate(rounds.max_rows, width + 1, width + 1, rounds.device, *widths)
    extend = HeadExtend(draft, rounds, state).phase
    return ForcedChain(
        rounds,
        width,
        state,
        EagleDrafter.hidden_mode,
        carried=min(setup.steps, 1),
        skipped=max(setup.steps - 1, 0),
        extend=(extend,),
    )
