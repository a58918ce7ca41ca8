"""One step of a batch on the device: takes a plan and returns tokens per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from common.engine.graphs import node_graphs
from common.engine.host_copies import on_device
from common.engine.sampling.sampler import SampleOutput, read_tokens
from common.engine.sampling.sampling_plan import SamplingVariant
from common.node.overlap import Completion
from decode_node.graphs.decode_graph import DecodeGraphs
from decode_node.hidden_states import StepStates, step_states
from decode_node.masked_step import MaskedStep
from decode_node.step_plan import PlannedRow, StepPlan
from decode_node.step_result import Launched, RowTokens, StepResult, Trees
from decode_node.step_rules import StepRules


class DecodeStep(Protocol):
    """Plain decoding, or speculation of one width; the worker treats them alike."""

    def launch(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> Launched:
        """Start the step over `plan.rows`, which is not empty. Page tables must be up to date.

        `begun` is called once the device has the target's forward and cannot run out of work while the host starts the
        rest; not in masked steps.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """The node's steps by width, how they are planned, and their forwards, not captured yet."""

    by_width: Mapping[int, DecodeStep]
    rules: StepRules
    graphs: Sequence[node_graphs.NodeGraphs[Any]]
    # device time by the phases of a round, to which steps add; empty without rounds
    phase_seconds: dict[str, float]
    forced: Mapping[int, DecodeStep] = field(default_factory=dict)  # wide steps for forced tokens, by width

    def of(self, plan: StepPlan) -> DecodeStep:
        """Return the step that a plan with rows runs."""
        return (self.forced if plan.forced_step else self.by_width)[plan.width]


def roots(count: int) -> Trees:
    """Return `count` trees without drafts."""
    return Trees([()] * count, [()] * count)


@dataclass(frozen=True, slots=True)
class LaunchedAutoregressive:
    """A launched step: one drawn token per row, in order."""

    rows: Sequence[PlannedRow]
    sampled: SampleOutput
    completion: Completion
    states: StepStates | None = None

    def read(self) -> StepResult:
        tokens = read_tokens(
            self.sampled, [row.logprobs for row in self.rows], [row.logprob_ids for row in self.rows]
        )
        results = [RowTokens([token]) for token in tokens]
        if self.states is not None:
            self.states.attach(results)
        return StepResult(results)


class AutoregressiveStep:
    """One token per request: gather the relay rows, forward, sample, scatter. No host synchronization."""

    def __init__(
        self, decode: DecodeGraphs, device: torch.device, completion: Callable[[], Completion]
    ) -> None:
        self._decode = decode
        self._device = device
        self._completion = completion
        # The rows of the latest step are kept, because most steps have the same ones as the step before.
        self._rows: list[int] = []
        self._sent = on_device([], device)

    def launch(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> Launched:
        assert plan.sampling is not None
        wanted = [planned.row for planned in plan.rows]
        if wanted != self._rows:
            self._rows, self._sent = wanted, on_device(wanted, self._device)
        rows = self._sent
        if plan.masked:
            return self._launch_masked(plan, rows, plan.sampling)
        sampled = self._decode(rows, plan.sampling)
        begun()
        return self._launched(plan, sampled, step_states(sampled.hidden, plan.states))

    def _launch_masked(self, plan: StepPlan, rows: torch.Tensor, sampling: SamplingVariant) -> MaskedStep:
        result = self._decode.forward(rows, sampling)
        states = step_states(result.hidden, plan.states)
        count = len(plan.rows)
        return MaskedStep(
            count,
            self._device,
            lambda: roots(count),
            lambda masks: self._launched(plan, self._decode.draw(rows, result, sampling, masks), states),
        )

    def _launched(
        self, plan: StepPlan, sampled: SampleOutput, states: StepStates | None
    ) -> LaunchedAutoregressive:
        return LaunchedAutoregressive(plan.rows, sampled.on_host(), self._completion(), states)
