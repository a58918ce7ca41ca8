"""The worker of a decode node that shares its device with a prefill node in the same process."""

from __future__ import annotations

from collections.abc import Collection

from common.node.shared_device import SharedDevice
from decode_node.step_plan import Masks, StepPlan
from decode_node.step_result import Launched, Trees, Worker


class ExclusiveWorker:
    """Launches only while the other worker does not. So the device runs all launches in order, on one stream."""

    def __init__(self, worker: Worker, device: SharedDevice) -> None:
        self._worker = worker
        self._device = device

    def apply(self, plan: StepPlan) -> Launched:
        with self._device:
            return self._worker.apply(plan)

    def unsaved(self) -> Collection[int]:
        return self._worker.unsaved()

    def trees(self) -> Trees:
        return self._worker.trees()

    def draw(self, masks: Masks) -> None:
        with self._device:
            self._worker.draw(masks)
