"""Applies plans to one device: the only place where device state of a prefill node changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.engine.host_copies import send
from common.engine.state.pool import KvPool
from common.kv_cache.host_plan import HostCopies
from common.node.overlap import Completion
from kv_transfer.send_order import SendOrder
from prefill_node.page_sending import PageSending
from prefill_node.step import PrefillStep
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched, PromptResult


@dataclass(frozen=True, slots=True)
class LaunchedWithoutForward:
    """A plan without a forward, which only drops kept data and stores prefixes."""

    completion: Completion

    def read(self) -> PromptResult:
        return PromptResult()


class DeviceWorker:
    """A worker with one device."""

    def __init__(
        self,
        step: PrefillStep,
        sending: PageSending,
        pool: KvPool,
        completion: Callable[[], Completion],
        host: HostCopies,
    ) -> None:
        """`pool`: that of the target, which holds the states of requests and of cached prefixes."""
        self._step = step
        self._sending = sending
        self._pool = pool
        self._completion = completion
        self._host = host

    def apply(self, plan: PromptPlan) -> Launched:
        """Launch everything that the plan contains, without waiting for the device."""
        self._step.forget(plan.forget)
        self._host.store(plan.stores)
        if not plan.chunks:
            return LaunchedWithoutForward(self._completion())
        self._restore(plan)
        with self._sending.during(plan):
            return self._step.launch(plan, functools.partial(self._host.load, plan.loads))

    def _restore(self, plan: PromptPlan) -> None:
        """Copy the states of cached prefixes to the slots of the prompts that continue them."""
        if copies := [(chunk.restore, chunk.slot) for chunk in plan.chunks if chunk.restore]:
            (index,) = send((np.asarray(copies, dtype=np.int64),), self._pool.device)
            source, target = index.unbind(1)
            self._pool.copy_states(source, target)

    def granted(self) -> None:
        self._sending.granted()

    def send(self, order: SendOrder) -> None:
        self._sending.send(order)
