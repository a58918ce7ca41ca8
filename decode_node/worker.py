"""Applies plans to one device. It is the only place that changes the device state of a decode node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.engine.state.relay_state import RelayState
from common.node.overlap import Completion
from decode_node.backups import Backups
from decode_node.host_fetches import HostMoves
from decode_node.masked_step import MaskedStep
from decode_node.pacing import Pacing
from decode_node.page_table import PageTable
from decode_node.step import DecodeSteps
from decode_node.step_plan import Masks, StepPlan
from decode_node.step_result import Launched, StepResult, Trees


@dataclass(frozen=True, slots=True)
class LaunchedMoves:
    """A plan without a step."""

    completion: Completion

    def read(self) -> StepResult:
        return StepResult([])


class DeviceWorker:
    """Executes plans on one device."""

    def __init__(
        self,
        steps: DecodeSteps,
        table: PageTable,
        relay: RelayState,
        backups: Backups,
        completion: Callable[[], Completion],
        pacing: Pacing,
        host: HostMoves,
    ) -> None:
        self._steps = steps
        self._table = table
        self._relay = relay
        self.backups = backups
        self._completion = completion
        self.pacing = pacing
        self._host = host
        self._undrawn: tuple[int, MaskedStep] | None = None  # generation of its plan

    def apply(self, plan: StepPlan) -> Launched:
        """Start everything that the plan contains, in order, without waiting for the device."""
        assert self._undrawn is None, "the step before waits for its masks"
        moves = plan.moves
        self._host.apply(moves)
        for save in moves.saves:
            self.backups.save(save)
        for join in moves.joins:
            self._relay.write_row(
                join.row, join.text, join.outputs, join.sampling, join.draft, join.rope_delta, join.slot
            )
        for load in moves.loads:
            self.backups.load(load)
        self.backups.forget(moves.forget)
        self._table.write(moves.cells)
        if not plan.rows:
            return LaunchedMoves(self._completion())
        launched = self._steps.of(plan).launch(plan, self.pacing.begun)
        if isinstance(launched, MaskedStep):
            self._undrawn = plan.generation, launched
            self.pacing.unpaced()
            return launched
        return self.pacing.paced(launched)

    def unsaved(self) -> Collection[int]:
        return self.backups.unsaved()

    def trees(self) -> Trees:
        assert self._undrawn is not None, "no step waits for masks"
        return self._undrawn[1].trees()

    def draw(self, masks: Masks) -> None:
        assert self._undrawn is not None, "no step waits for masks"
        generation, step = self._undrawn
        assert generation == masks.generation, f"masks of plan {masks.generation} for plan {generation}"
        self._undrawn = None
        step.draw(masks)
