"""The worker of a node with several ranks: rank 0 sends every plan to the others and applies it itself."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from common.node.ranks.checked_launch import CheckedLaunch
from common.node.ranks.ended_copies import OrderedCopies
from decode_node.step_plan import Masks, StepPlan
from decode_node.step_result import Launched, Trees, Worker


class RankedWorker:
    """Executes plans on rank 0, whose results are read, and on all others.

    Everything that influences what a device computes is in the plans and masks, so that all ranks compute the same.
    """

    def __init__(
        self,
        first: Worker,
        send_plan: Callable[[bytes], None],
        saved: Callable[[], int],
        check: Callable[[], None],
    ) -> None:
        """Execute plans with `first`, the worker of rank 0, and send them to the others with `send_plan`.

        Args:
            saved: returns how many saves have ended on all other ranks, counted in the order of the plans.
            check: raises RankFailed if a collective of a complete plan has failed.
        """
        self._first = first
        self._send_plan = send_plan
        self._saved = saved
        self._check = check
        self._saves = OrderedCopies()  # ended on all other ranks
        self._encoder = msgspec.msgpack.Encoder()

    def apply(self, plan: StepPlan) -> Launched:
        """Start everything that the plan contains on all ranks; on the others first, which have to hear of it."""
        self._send_plan(self._encoder.encode(plan))
        self._saves.add(save.key for save in plan.moves.saves)
        return CheckedLaunch(self._first.apply(plan), self._check)

    def unsaved(self) -> Collection[int]:
        self._saves.end_first(self._saved())
        return {*self._first.unsaved(), *self._saves}

    def trees(self) -> Trees:
        return self._first.trees()

    def draw(self, masks: Masks) -> None:
        self._send_plan(self._encoder.encode(masks))
        self._first.draw(masks)
