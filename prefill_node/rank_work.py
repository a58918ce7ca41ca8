"""Applies the plans of rank 0 on another rank of a prefill node."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.node.ranks.launched_plans import LaunchedPlans
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Worker


class PromptRankWork:
    """Implements `RankWork`."""

    def __init__(self, worker: Worker, check: Callable[[], None]) -> None:
        """Apply plans with `worker`. `check` raises RankFailed if a collective of a complete plan has failed."""
        self._worker = worker
        self._launched = LaunchedPlans(check)
        self._decoder = msgspec.msgpack.Decoder(PromptPlan)

    @property
    def completed(self) -> int:
        return self._launched.completed

    def apply(self, frame: bytes) -> None:
        plan = self._decoder.decode(frame)
        self._launched.add(plan.generation, self._worker.apply(plan).completion)

    def turn(self) -> bool:
        return self._launched.look()
