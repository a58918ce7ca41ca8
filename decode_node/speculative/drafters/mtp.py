"""Drafts by several modules of multi-token prediction: one module per step, and no forward before verify.

The proposal of a round is stored in the relay row: each module drafted it when it processed the previous round. Rows of
module k end where the target's rows end and begin k rows earlier, because the drafts with which their KV was computed
have been replaced by known tokens: see `common/engine/models/mtp.py`. All modules run in one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.forward.draft_inputs import DraftExtendInput, TreeVerifyInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.graphs.rules import Phase
from common.engine.graphs.slots import Inputs, Slot
from common.engine.ops.keep_hidden import keep_hidden
from decode_node.speculative.drafters import eagle
from decode_node.speculative.drafters.drafter import Drafter, DrafterSetup
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


class MtpDrafter:
    """Proposes chains of as many drafts as there are modules.

    Args:
        target_hidden: hidden values per token that the first module reads (DraftExtendInput.hidden_size_for).
    """

    hidden_mode = CaptureHiddenMode.FULL
    slots: Sequence[Slot[RoundCall]] = ()

    def __init__(self, runner: MtpRunner, rounds: Rounds, target_hidden: int) -> None:
        self._relay = rounds.relay
        self.nodes = self.lookahead_slots = len(runner.modules) + 1
        widths = target_hidden, rounds.relay.draft.hidden.dtype
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.nodes, rounds.device, *widths)
        self._extend = ModulesExtend(runner, rounds, self.state).phase
        self.phases: Sequence[RoundPhase[Nothing]] = (self._extend,)

    def propose(self, call: RoundCall) -> None:
        """Put forced tokens in the place of drafts, which were made at the end of the previous round."""
        if call.forced is not None:
            rows = call.placed[:, 0]
            drafts = self._relay.draft.draft_topk_ids.index_select(0, rows)
            replace_drafts(drafts, call.forced)
            self._relay.draft.draft_topk_ids.index_copy_(0, rows, drafts)

    def trees(self, call: RoundCall) -> tuple[Tensor, Tensor]:
        rows = call.placed[:, 0]
        _, parents = self.state.drafts(len(rows))
        return self._relay.draft.draft_topk_ids.index_select(0, rows), parents

    def fill(self, batch: Round, inputs: Inputs) -> None:
        drafts = self._relay.draft.draft_topk_ids.index_select(0, batch.rows)
        self.state.tree.first(batch.count).tokens[:, 1:] = drafts

    def draft_extend(self, call: RoundCall) -> None:
        self._extend(call)


class ModulesExtend:
    """The draft-extend phase of all modules over the window of `state.walk`."""

    def __init__(self, runner: MtpRunner, rounds: Rounds, state: RoundState) -> None:
        self._modules = runner.modules
        self._relay = rounds.relay
        self._walk = state.walk
        self._steps = steps = len(runner.modules)
        self._nodes = state.walk.ids.shape[1]
        rows, carried = rounds.relay.draft.hidden.shape
        self._kept = rounds.relay.draft.hidden.view(rows, steps - 1, carried // max(steps - 1, 1))
        self._chains = TreeVerifyInput.zeros(rounds.max_rows, self._nodes + steps - 1, rounds.device)
        self.phase = rounds.phase(
            Phase.DRAFT_EXTEND,
            "draft",
            self._run,
            NOTHING,
            PhaseForward(ForwardMode.VERIFY, self._nodes, DraftExtendInput.hidden_mode),
        )

    def _run(self, batch: Round, inputs: Inputs, variant: str) -> Nothing:
        """Run all modules. Each reads the drafts of the previous modules after the round's last token."""
        walk = self._walk.first(batch.count)
        rows = batch.rows.contiguous()
        kept = self._kept.index_select(0, rows)
        emitted = walk.accepted + 1
        # tokens[:, i] is at position walk.start + 1 + i; the drafts of the next round follow the emitted tokens.
        tokens = F.pad(walk.ids, (0, self._steps))
        hidden, probs, ids = walk.hidden, list[Tensor](), list[Tensor]()
        for step, module in enumerate(self._modules):
            if step:
                hidden = _opened(kept[:, step - 1], hidden, walk.start >= step)
            window = ModuleWindow(batch, walk.start, step, self._nodes)
            given = module.forward(window.batch(tokens, self._chains), hidden.flatten(0, 1))
            state = module.propose(window.row(emitted + step), given)
            tokens.scatter_(1, (emitted + step)[:, None], state.draft_topk_ids)
            probs.append(state.draft_topk_probs)
            ids.append(state.draft_topk_ids)
            if step < self._steps - 1:
                lens = torch.where(batch.live, emitted - window.missing, 0)
                keep_hidden(given.hidden, rows, self._kept, step, lens, window.starts)
            hidden = given.hidden.view(batch.count, window.width, given.hidden.shape[-1])
        self._relay.write_proposal(rows, torch.cat(probs, dim=1), torch.cat(ids, dim=1))
        return Nothing()


class ModuleWindow:
    """Rows of module `step`: positions start - step .. start + nodes - 1 of each request.

    A request shorter than `step` starts at position 0 and has that many more rows at its end. Their results are not
    read, and the KV that they write is overwritten before it is read.
    """

    def __init__(self, batch: Round, start: Tensor, step: int, nodes: int) -> None:
        self.width = nodes + step
        self.missing = (step - start).clamp(min=0)  # [R] positions before the start of the text
        self.starts = batch.index[: batch.count] * self.width  # [R] first row of each request
        self._around = replace(batch, seq_len=start - step + self.missing)

    def row(self, count: Tensor) -> Tensor:
        """[R] index, among all rows, of each request's last row if it has `count` rows including the missing ones."""
        return self.starts + count - self.missing - 1

    def batch(self, tokens: Tensor, chains: TreeVerifyInput) -> ForwardBatch:
        """Build the forward. tokens [R, nodes + steps] start after the round's first row; `chains` must be as wide."""
        around, width = self._around, self.width
        places = self.missing[:, None] + around.index[:width]
        ids = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
        depth, mask = chains.depth[: around.count, :width], chains.mask[: around.count, :width, :width]
        return around.window(ids, depth, mask, self.starts[:0])


def _opened(kept: Tensor, hidden: Tensor, long_enough: Tensor) -> Tensor:
    """[R, W + 1, H]: adds a row at the front, or at the end if the text has no position for it."""
    in_front = torch.cat((kept[:, None], hidden), dim=1)
    at_end = torch.cat((hidden, kept[:, None]), dim=1)
    return torch.where(long_enough[:, None, None], in_front, at_end)


def make_drafter(setup: DrafterSetup) -> Drafter:
    """Build a drafter of several modules; a single one runs at every step and drafts like an EAGLE head."""
    if isinstance(setup.runner, DraftRunner):
        return eagle.make_drafter(setup)
    assert isinstance(setup.runner, MtpRunner)
    assert setup.config is not None
    return MtpDrafter(setup.runner, setup.rounds, DraftExtendInput.hidden_size_for(setup.config))


def make_forced_chain(setup: DrafterSetup, width: int) -> ForcedChain:
    """Build chains of up to `width` forced tokens; a request without any verifies the drafts of all modules."""
    runner, rounds = setup.runner, setup.rounds
    if isinstance(runner, DraftRunner):
        return eagle.make_forced_chain(setup, width)
    assert isinstance(runner, MtpRunner)
    assert setup.config is not None
    widths = DraftExtendInput.hidden_size_for(setup.config), rounds.relay.draft.hidden.dtype
    state = RoundState.allocate(rounds.max_rows, width + 1, width + 1, rounds.device, *widths)
    extend = ModulesExtend(runner, rounds, state).phase
    hidden_mode, drafts = MtpDrafter.hidden_mode, len(runner.modules)
    return ForcedChain(rounds, width, state, hidden_mode, carried=drafts, extend=(extend,))
