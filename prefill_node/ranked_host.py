"""Host memory of a node with several ranks: each copies its share by the same plans, and rank 0 decides for all.

Each rank has as many pages and slots of host memory as every other one. Rank 0 treats pages as stored, and a
loaded prefix as intact, only once the board shows the same for all other ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from common.errors import RankFailed
from common.kv_cache.host_plan import Comparison, Damage, HostCopy, HostMemory, RankStore, Store
from common.node.overlap import Completion
from common.node.ranks.board import Board, BoardField
from common.node.ranks.ended_copies import OrderedCopies, ShownComparisons, found_damaged
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched, PromptResult

POLL_SECONDS = 0.0005
COMPARE_SECONDS = 60.0  # for another rank to compare what it has loaded, after the forward


class StoredByAll:
    """The `RankStore` of rank 0: a store ends once it has ended on all ranks."""

    def __init__(self, own: RankStore, ended: Callable[[], int]) -> None:
        """`ended` returns how many stores have ended on all other ranks, in the order of the plans."""
        self._own = own
        self._ended = ended
        self._stores = OrderedCopies()  # ended on all other ranks

    def store(self, stores: Sequence[Store]) -> None:
        self._own.store(stores)
        self._stores.add(each.key for each in stores)

    def load(self, loads: Sequence[HostCopy]) -> Comparison:
        return self._own.load(loads)

    def close(self) -> None:
        self._own.close()

    def unfinished(self) -> Collection[int]:
        self._stores.end_first(self._ended())
        return {*self._own.unfinished(), *self._stores}


class OtherVerdicts:
    """Tells how the loads of plans went on the other ranks. The plans with loads are counted from 0."""

    def __init__(self, board: Board, size: int) -> None:
        self._board = board
        self._others = range(1, size)

    def missing(self, number: int) -> int | None:
        """Return a rank that has not compared what a plan has loaded; None if all have."""
        return next(
            (rank for rank in self._others if self._board.read(rank, BoardField.COMPARED) <= number), None
        )

    def damaged(self, number: int) -> bool:
        """Return whether some rank got other bytes than it had stored; only once no rank is `missing`."""
        return found_damaged(self._board, self._others, number)


class RankHost:
    """The stores and loads of a rank other than rank 0, which it shows on the board as they end."""

    def __init__(self, own: HostMemory, show: Callable[[BoardField, int], None]) -> None:
        self._own = own
        self._show = show
        self._stores = OrderedCopies()
        # (generation, launched plan with loads that has not been compared)
        self._loads: deque[tuple[int, Launched]] = deque()
        self._comparisons = ShownComparisons(show)

    def add(self, plan: PromptPlan, launched: Launched) -> None:
        self._stores.add(each.key for each in plan.stores)
        if plan.loads:
            self._loads.append((plan.generation, launched))

    def turn(self, completed: int) -> bool:
        """Compare and show what has ended, up to the plan `completed`. Return whether something has not."""
        while self._loads and self._loads[0][0] <= completed:
            _, launched = self._loads.popleft()
            # Checksums of loads may be those of stores that have just ended.
            self._show_stores()
            self._comparisons.add(any(launched.read().damage))
        self._show_stores()
        return bool(self._stores or self._loads)

    def _show_stores(self) -> None:
        if self._stores:
            self._stores.end_until(self._own.unfinished())
            self._show(BoardField.SAVED, self._stores.ended)


@dataclass(frozen=True, slots=True)
class ComparedByAll:
    """A launched plan with loads, and its `Completion`: the results may be read once all ranks have compared theirs."""

    launched: Launched
    loads: Sequence[HostCopy]
    verdicts: OtherVerdicts
    number: int  # among the plans with loads

    @property
    def completion(self) -> Completion:
        return self

    def due(self) -> bool:
        return self.launched.completion.due()

    def ready(self) -> bool:
        return self.launched.completion.ready() and self.verdicts.missing(self.number) is None

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.launched.completion.wait(meanwhile)
        until = time.monotonic() + COMPARE_SECONDS
        while (rank := self.verdicts.missing(self.number)) is not None:
            if time.monotonic() > until:
                raise RankFailed(
                    rank,
                    f"rank {rank} has not compared what it loaded for {COMPARE_SECONDS:.0f} s; restart the node",
                )
            if meanwhile is not None:
                meanwhile()
            time.sleep(POLL_SECONDS)

    def read(self) -> PromptResult:
        result = self.launched.read()
        if not self.verdicts.damaged(self.number):
            return result
        pages = tuple(page for each in self.loads for page in each.host_pages)
        slots = tuple(slot for each in self.loads for _, slot in each.states)
        return replace(result, damage=Damage(pages, slots))
