"""The worker of a prefill node that shares its device with a decode node in the same process."""

from __future__ import annotations

from common.node.shared_device import SharedDevice
from kv_transfer.send_order import SendOrder
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched, Worker


class ExclusiveWorker:
    """Launches only while the other worker does not. So the device runs all launches in order, on one stream."""

    def __init__(self, worker: Worker, device: SharedDevice) -> None:
        self._worker = worker
        self._device = device

    def apply(self, plan: PromptPlan) -> Launched:
        with self._device:
            return self._worker.apply(plan)

    def granted(self) -> None:
        self._worker.granted()

    def send(self, order: SendOrder) -> None:
        self._worker.send(order)
