"""Shows rank 0 which copies to and from host memory have ended on other ranks, and whether their bytes had changed.

All ranks have the same plans, so the copies of a node have one order, and a rank shows only how many of the first ones
have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

from common.node.ranks.board import Board, BoardField

SHOWN = 64  # comparisons whose outcome a rank shows, the newest; more than a node has in progress


class OrderedCopies:
    """The keys of copies in the order of the plans, without the first `ended` ones, which have ended."""

    def __init__(self) -> None:
        self._keys: deque[int] = deque()
        self.ended = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def add(self, keys: Iterable[int]) -> None:
        self._keys.extend(keys)

    def end_first(self, count: int) -> None:
        """Note that the first `count` copies have ended."""
        while self.ended < count:
            self._end_oldest()

    def end_until(self, unfinished: Container[int]) -> None:
        """Note that all copies before the first of those in `unfinished` have ended."""
        while self._keys and self._keys[0] not in unfinished:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._keys.popleft()
        self.ended += 1


class ShownComparisons:
    """Shows rank 0 the outcome of one comparison after the other."""

    def __init__(self, show: Callable[[BoardField, int], None]) -> None:
        self._show = show
        self._compared = self._damaged = 0

    def add(self, damaged: bool) -> None:
        bit = 1 << self._compared % SHOWN
        self._damaged = self._damaged | bit if damaged else self._damaged & ~bit
        self._compared += 1
        self._show(BoardField.DAMAGED, self._damaged)
        self._show(BoardField.COMPARED, self._compared)


def found_damaged(board: Board, ranks: Iterable[int], number: int) -> bool:
    """Return whether one of the ranks has found other bytes than it had stored in comparison `number`, from 0."""
    return any(board.read(rank, BoardField.DAMAGED) >> number % SHOWN & 1 for rank in ranks)
