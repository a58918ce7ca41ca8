"""Turns scheduling decisions into one plan per turn, and the results of a plan into tokens of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from common.engine.sampling.sampling_plan import sampling_variant
from common.node.announced_work import Work
from decode_node.batch_resources import BatchResources
from decode_node.batch_rows import BatchRows
from decode_node.request import DecodeRequest, Emission
from decode_node.step_plan import NO_MOVES, Moves, PlannedRow, StepPlan
from decode_node.step_result import Launched
from decode_node.step_rules import StepRules


def step_plan(
    batch: Sequence[DecodeRequest],
    rules: StepRules,
    generation: int,
    moves: Moves = NO_MOVES,
) -> StepPlan:
    """Plan one step over requests that have pages and rows; an empty batch gives a plan of moves only."""
    if not batch:
        return StepPlan(generation=generation, moves=moves)
    rows = []
    for request in batch:
        assert request.lease is not None
        rows.append(PlannedRow(request.row, len(request.lease.pages), request.sampling.logprobs))
    width = rules.widths.choose(len(batch))
    return StepPlan(
        generation=generation,
        moves=moves,
        rows=tuple(rows),
        width=width,
        sampling=sampling_variant(request.sampling for request in batch),
        drafts=rules.drafts.propose(batch, width),
    )


class Planned(NamedTuple):
    """A plan and the requests of its rows."""

    plan: StepPlan
    batch: Sequence[DecodeRequest]


class Planner:
    """Makes plans and reads their results in the same order."""

    def __init__(self, resources: BatchResources, rows: BatchRows, rules: StepRules) -> None:
        self._resources = resources
        self._rows = rows
        self._rules = rules
        self._unread: deque[Planned] = deque()
        self._generation = 0

    def next(self) -> Planned | None:
        """Return the plan of this turn; None if the device has nothing to do."""
        batch = self._resources.batch()
        moves = self._rows.take_moves()
        if not batch and not moves:
            return None
        self._generation += 1
        planned = Planned(step_plan(batch, self._rules, self._generation, moves), batch)
        self._unread.append(planned)
        self._resources.planned(self._generation)
        return planned

    def launched(self, planned: Planned) -> None:
        """Count the step as in flight."""
        for request in planned.batch:
            request.step_launched(self._rules.tokens_per_step)

    def read(self, launched: Launched) -> list[Emission]:
        """Process the results of the oldest unread plan, after its completion."""
        plan, batch = self._unread.popleft()
        result = launched.read()
        self._resources.read(plan.generation)
        emissions = [
            Emission(request, row.tokens, row.drafted)
            for request, row in zip(batch, result.rows, strict=True)
        ]
        # Drafts past the end of an answer say nothing about acceptance.
        accepted = [len(each.tokens) - 1 for each in emissions if not each.request.ended]
        if batch:
            self._rules.widths.observe(len(batch), plan.width, accepted, result.seconds)
        for emission in emissions:
            emission.request.step_read(self._rules.tokens_per_step, len(emission.tokens))
        return emissions

    def work(self, planned: Planned) -> Work:
        """Estimate the work of a plan's step. A row may verify fewer drafts than it has room for."""
        batch = planned.batch
        drafts = len(batch) * (self._rules.tokens_per_step - 1)
        return Work.of(len(batch), sum(request.seq_len for request in batch), drafts)
