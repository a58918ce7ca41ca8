"""Applies plans to one device: the only place where device state of a prefill node changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.node.overlap import Completion
from prefill_node.page_sending import PageSending
from prefill_node.send_orders import SendOrder
from prefill_node.step import PrefillStep
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched, PromptResult


@dataclass(frozen=True, slots=True)
class LaunchedWithoutForward:
    """A plan without a forward, which only drops kept data."""

    completion: Completion

    def read(self) -> PromptResult:
        return PromptResult()


class DeviceWorker:
    """A worker with one device."""

    def __init__(self, step: PrefillStep, sending: PageSending, completion: Callable[[], Completion]) -> None:
        self._step = step
        self._sending = sending
        self._completion = completion

    def apply(self, plan: PromptPlan) -> Launched:
        """Launch everything that the plan contains, without waiting for the device."""
        self._step.forget(plan.forget)
        if not plan.chunks:
            return LaunchedWithoutForward(self._completion())
        with self._sending.during(plan):
            return self._step.launch(plan)

    def send(self, order: SendOrder) -> None:
        self._sending.send(order)
