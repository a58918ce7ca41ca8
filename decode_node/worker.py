"""Applies plans to one device. It is the only place that changes the device state of a decode node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.engine.state.relay_state import RelayState
from common.node.overlap import Completion
from decode_node.backups import Backups
from decode_node.page_table import PageTable
from decode_node.step import DecodeStep
from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched, StepResult


@dataclass(frozen=True, slots=True)
class LaunchedMoves:
    """A plan without a step. Once it is complete, the pages and rows that it saved may be reused."""

    completion: Completion

    def read(self) -> StepResult:
        return StepResult([])


class DeviceWorker:
    """Executes plans on one device. `steps` are keyed by width (see `StepPlan.width`)."""

    def __init__(
        self,
        steps: Mapping[int, DecodeStep],
        table: PageTable,
        relay: RelayState,
        backups: Backups,
        completion: Callable[[], Completion],
    ) -> None:
        self._steps = dict(steps)
        self._table = table
        self._relay = relay
        self._backups = backups
        self._completion = completion

    def apply(self, plan: StepPlan) -> Launched:
        """Start everything that the plan contains, in order. The step does not wait for the device; saves do."""
        moves = plan.moves
        for save in moves.saves:
            self._backups.save(save)
        for join in moves.joins:
            self._relay.write_row(
                join.row, join.text, join.outputs, join.sampling, join.draft, join.rope_delta, join.slot
            )
        for load in moves.loads:
            self._backups.load(load)
        self._backups.forget(moves.forget)
        self._table.write(moves.cells)
        if not plan.rows:
            return LaunchedMoves(self._completion())
        return self._steps[plan.width].launch(plan)
