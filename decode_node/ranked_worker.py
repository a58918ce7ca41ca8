"""The worker of a node with several ranks: rank 0 sends every plan to the others and applies it itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from decode_node.step_plan import Masks, StepPlan
from decode_node.step_result import Launched, Trees, Worker

PATIENCE = 5.0  # seconds for a rank to make room in a full ring of plans


class PlanWriter(Protocol):
    """The ring of plans."""

    def send(self, frame: bytes, patience: float, /) -> None: ...


class RankedWorker:
    """Executes plans on rank 0, whose results are read, and on all others.

    Everything that influences what a device computes is in the plans and masks, so that all ranks compute the same.
    """

    def __init__(self, first: Worker, plans: PlanWriter, saved: Callable[[], int]) -> None:
        """Execute plans with `first`, the worker of rank 0, and send them through `plans`.

        Args:
            saved: returns how many saves have ended on all other ranks, counted in the order of the plans.
        """
        self._first = first
        self._plans = plans
        self._saved = saved
        self._saves: deque[int] = deque()  # keys of saves that have not ended on some other rank
        self._ended = 0  # saves that have
        self._encoder = msgspec.msgpack.Encoder()

    def apply(self, plan: StepPlan) -> Launched:
        """Start everything that the plan contains on all ranks; on the others first, which have to hear of it."""
        self._plans.send(self._encoder.encode(plan), PATIENCE)
        self._saves += (save.key for save in plan.moves.saves)
        return self._first.apply(plan)

    def unsaved(self) -> Collection[int]:
        for _ in range(self._saved() - self._ended):
            self._saves.popleft()
            self._ended += 1
        return {*self._first.unsaved(), *self._saves}

    def trees(self) -> Trees:
        return self._first.trees()

    def draw(self, masks: Masks) -> None:
        self._plans.send(self._encoder.encode(masks), PATIENCE)
        self._first.draw(masks)
