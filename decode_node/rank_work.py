"""Applies the plans of rank 0 on another rank of a decode node."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.node.ranks.board import BoardField
from common.node.ranks.ended_copies import OrderedCopies
from common.node.ranks.launched_plans import LaunchedPlans
from decode_node.ranked_host import RankFetches
from decode_node.step_plan import Masks, StepPlan
from decode_node.step_result import Launched, Worker


class DecodeRankWork:
    """Implements `RankWork`."""

    def __init__(
        self,
        worker: Worker,
        host: RankFetches,
        show: Callable[[BoardField, int], None],
        check: Callable[[], None],
    ) -> None:
        """Apply plans with `worker`.

        Args:
            host: what `worker` applies copies with.
            show: shows rank 0 how many saves have ended, in the order of the plans.
            check: raises RankFailed if a collective of a complete plan has failed.
        """
        self._worker = worker
        self._host = host
        self._show = show
        self._launched = LaunchedPlans(check)
        self._undrawn: tuple[int, Launched] | None = None  # (generation, masked step)
        self._saves = OrderedCopies()
        self._decoder = msgspec.msgpack.Decoder(StepPlan | Masks)

    @property
    def completed(self) -> int:
        return self._launched.completed

    def apply(self, frame: bytes) -> None:
        message: StepPlan | Masks = self._decoder.decode(frame)
        if isinstance(message, StepPlan):
            launched = self._worker.apply(message)
            self._saves.add(save.key for save in message.moves.saves)
            if message.masked:
                self._undrawn = message.generation, launched
            elif message.rows:
                # Others are complete before the next step, and rank 0 does not wait for all of them.
                self._launched.add(message.generation, launched.completion)
            return
        assert self._undrawn is not None, "masks come after the plan of their step"
        generation, launched = self._undrawn
        self._undrawn = None
        self._worker.draw(message)
        self._launched.add(generation, launched.completion)

    def turn(self) -> bool:
        busy = self._launched.poll()
        if self._saves:
            self._saves.end_until(self._worker.unsaved())
            self._show(BoardField.SAVED, self._saves.ended)
        return self._host.turn() or busy or bool(self._saves)
