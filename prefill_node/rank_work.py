"""Applies the plans of rank 0 on another rank of a prefill node."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.node.ranks.launched_plans import LaunchedPlans
from prefill_node.ranked_host import RankHost
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Worker


class PromptRankWork:
    """Implements `RankWork`."""

    def __init__(self, worker: Worker, host: RankHost, check: Callable[[], None]) -> None:
        """Apply plans with `worker`.

        Args:
            host: shows rank 0 which copies to and from host memory have ended.
            check: raises RankFailed if a collective of a complete plan has failed.
        """
        self._worker = worker
        self._host = host
        self._launched = LaunchedPlans(check)
        self._decoder = msgspec.msgpack.Decoder(PromptPlan)

    @property
    def completed(self) -> int:
        return self._launched.completed

    def apply(self, frame: bytes) -> None:
        plan = self._decoder.decode(frame)
        launched = self._worker.apply(plan)
        self._host.add(plan, launched)
        self._launched.add(plan.generation, launched.completion)

    def turn(self) -> bool:
        busy = self._launched.poll()
        return self._host.turn(self.completed) or busy
