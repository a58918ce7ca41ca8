"""One speculative step: draft, verify with one target forward, accept, and draft-extend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import Phase
from common.engine.host_copies import on_device, on_host
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import read_tokens
from common.node.overlap import Completion
from common.node.stopwatch import Stopwatch
from decode_node.hidden_states import StepStates, step_states
from decode_node.masked_step import MaskedStep
from decode_node.speculative.drafters.drafter import Drafter
from decode_node.speculative.rounds import RoundCall
from decode_node.speculative.verifier import Acceptor
from decode_node.speculative.verify import Emitted, Verify
from decode_node.step_plan import PlannedRow, StepPlan
from decode_node.step_result import Launched, RowTokens, StepResult, Trees

PHASES = (Phase.DRAFT.value, Phase.VERIFY.value, Phase.DRAFT_EXTEND.value)


def no_seconds() -> dict[str, float]:
    """Return the device time of each phase, initially zero."""
    return dict.fromkeys(PHASES, 0.0)


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """A launched round: 1 .. N tokens per request, drawn after the nodes of the accepted path."""

    rows: Sequence[PlannedRow]
    emitted: Emitted
    drafted: Sequence[int]  # per row
    completion: Completion
    watch: Stopwatch
    phase_seconds: dict[str, float]  # totals to which this round is added
    states: StepStates | None = None

    def read(self) -> StepResult:
        laps = self.watch.seconds()
        for phase, seconds in zip(PHASES, laps, strict=True):
            self.phase_seconds[phase] += seconds
        sampled, counts = self.emitted.read()
        depth = len(sampled.token_ids) // len(self.rows)
        every = [row for row in self.rows for _ in range(depth)]
        drawn = read_tokens(sampled, [row.logprobs for row in every], [row.logprob_ids for row in every])
        rows = [
            RowTokens(drawn[index * depth : index * depth + count], drafted)
            for index, (count, drafted) in enumerate(zip(counts, self.drafted, strict=True))
        ]
        if self.states is not None:
            self.states.attach(rows)
        return StepResult(rows, sum(laps))


class SpeculativeStep:
    """The `DecodeStep` of any drafter. Nothing in `launch` waits for the device."""

    def __init__(
        self,
        verify: Verify,
        drafter: Drafter,
        acceptor: Acceptor,
        device: torch.device,
        completion: Callable[[], Completion],
        stopwatch: Callable[[], Stopwatch],
        phase_seconds: dict[str, float],
    ) -> None:
        """`phase_seconds`, from `no_seconds`, accumulates device time; steps may share one."""
        self.verify = verify
        self.drafter = drafter
        self._acceptor = acceptor
        self.device = device
        self._completion = completion
        self._stopwatch = stopwatch
        self.phase_seconds = phase_seconds

    @property
    def tokens_per_step(self) -> int:
        """KV slots that a round may write per request, which also bounds the tokens that it may draw."""
        return self.drafter.lookahead_slots

    @property
    def extra_slots(self) -> int:
        """KV slots that a round may need past the last token of a request, for parallel branches of a tree."""
        return self._acceptor.extra_slots

    @property
    def graphs(self) -> list[NodeGraphs[Any]]:
        """The graphs of all phases, in the order of a round."""
        phases = [*self.drafter.phases, self.verify.phase]
        phases.sort(key=lambda phase: PHASES.index(phase.graphs.spec.phase))
        return [phase.node_graphs for phase in phases]

    @torch.inference_mode()
    def launch(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> Launched:
        drafts = self.drafter.nodes - 1
        call = self._call(plan, drafts)
        watch = self._stopwatch()
        self.drafter.propose(call)
        watch.lap()
        if plan.masked:
            return self._launch_masked(plan, call, watch)
        emitted = self.verify(call)
        begun()
        return self._finish(plan, call, watch, emitted)

    def _launch_masked(self, plan: StepPlan, call: RoundCall, watch: Stopwatch) -> MaskedStep:
        """Launch the target's forward, and before it the copy of the drafts, from which the host computes masks."""
        tokens, parents = self.drafter.trees(call)
        copied, proposed = on_host(torch.cat((tokens, parents), dim=1)), self._completion()
        output = self.verify.forward(call)

        def trees() -> Trees:
            proposed.wait()
            both, drafts = copied.tolist(), copied.shape[1] // 2
            return Trees([row[:drafts] for row in both], [row[drafts:] for row in both])

        def finish(masks: LogitMasks) -> LaunchedRound:
            return self._finish(plan, call, watch, self.verify.decide(call, output, masks))

        return MaskedStep(len(plan.rows) * self.drafter.nodes, self.device, trees, finish)

    def _finish(self, plan: StepPlan, call: RoundCall, watch: Stopwatch, emitted: Emitted) -> LaunchedRound:
        copied, states = emitted.on_host(), step_states(emitted.states, plan.states)
        watch.lap()
        self.drafter.draft_extend(call)
        watch.lap()
        done = self._completion()
        drafted = [len(each) for each in plan.drafts] or [self.drafter.nodes - 1] * len(plan.rows)
        return LaunchedRound(plan.rows, copied, drafted, done, watch, self.phase_seconds, states)

    def _call(self, plan: StepPlan, drafts: int) -> RoundCall:
        """Copy rows, page counts and host drafts or forced tokens, padded to `drafts`, to the device at once."""
        assert plan.sampling is not None
        told = [[planned.row, planned.pages] for planned in plan.rows]
        pad = 0 if plan.drafts else -1
        for row, found in zip(told, plan.drafts or plan.forced):
            row.extend((*found, *[pad] * (drafts - len(found))))
        values = on_device(told, self.device)
        placed, rest = values[:, :2], values[:, 2:]
        if plan.drafts:
            return RoundCall(placed, plan.sampling, drafts=rest)
        return RoundCall(placed.contiguous(), plan.sampling, forced=rest if plan.forced else None)
