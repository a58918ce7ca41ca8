"""Host memory of a decode node with several ranks: each copies its share by the same plans, and rank 0 decides for all.

Rank 0 treats pages as stored, and fetched pages as intact, only once the board shows the same for all other ranks.
Stores and fetches are counted in the order of the plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from common.kv_cache.host_plan import Damage, HostFetch
from common.node.ranks.board import Board, BoardField
from common.node.ranks.ended_copies import OrderedCopies, ShownComparisons, found_damaged
from decode_node.host_fetches import HostFetches
from decode_node.step_plan import Moves


class OwnFetches:
    """The copies of one rank, in the order of the plans."""

    def __init__(self, own: HostFetches) -> None:
        self._own = own
        self._stores = OrderedCopies()
        self._fetches: deque[HostFetch] = deque()
        self._early: dict[int, Damage] = {}  # key -> what differed, of fetches that wait for one before them

    @property
    def busy(self) -> bool:
        return bool(self._stores or self._fetches)

    @property
    def stored(self) -> int:
        """Number of stores that have ended."""
        return self._stores.ended

    def apply(self, moves: Moves) -> None:
        self._own.apply(moves)
        self._stores.add(each.key for each in moves.stores)
        self._fetches += moves.fetches

    def count_stores(self) -> None:
        """Count the stores that have ended."""
        if self._stores:
            self._stores.end_until(self._own.unfinished())

    def ended(self) -> Iterator[tuple[HostFetch, Damage]]:
        """Yield the fetches that have ended, each once, and what differed."""
        if self._fetches:
            self._early.update(self._own.fetched())
        while self._fetches and self._fetches[0].key in self._early:
            fetch = self._fetches.popleft()
            yield fetch, self._early.pop(fetch.key)


class RankFetches:
    """The copies of a rank other than rank 0, which it shows on the board as they end."""

    def __init__(self, own: HostFetches, show: Callable[[BoardField, int], None]) -> None:
        self._copies = OwnFetches(own)
        self._show = show
        self._comparisons = ShownComparisons(show)

    def apply(self, moves: Moves) -> None:
        self._copies.apply(moves)

    def turn(self) -> bool:
        """Show what has ended. Return whether something has not."""
        if not self._copies.busy:
            return False
        # A fetch may read blocks whose store, and with it their checksums, has just ended.
        self._copies.count_stores()
        for _, damage in self._copies.ended():
            self._comparisons.add(any(damage))
        self._show(BoardField.STORED, self._copies.stored)
        return self._copies.busy


class FetchedByAll:
    """The `AppliedFetches` of rank 0: a copy ends once it has ended on all ranks."""

    def __init__(self, own: HostFetches, board: Board, size: int) -> None:
        """`size`: number of ranks."""
        self._own = own
        self.copies = OwnFetches(own)  # public for tests
        self._board = board
        self._others = range(1, size)
        self._stores = OrderedCopies()  # ended on all other ranks
        self._fetched: deque[tuple[HostFetch, Damage]] = deque()  # ended here, perhaps not on some other rank
        self._compared = 0  # fetches that have ended on all

    def apply(self, moves: Moves) -> None:
        self.copies.apply(moves)
        self._stores.add(each.key for each in moves.stores)

    def unfinished(self) -> Collection[int]:
        self.copies.count_stores()
        self._stores.end_first(self._least(BoardField.STORED))
        return {*self._own.unfinished(), *self._stores}

    def fetched(self) -> Mapping[int, Damage]:
        self._fetched += self.copies.ended()
        found: dict[int, Damage] = {}
        compared = self._least(BoardField.COMPARED)
        while self._fetched and self._compared < compared:
            fetch, damage = self._fetched.popleft()
            if found_damaged(self._board, self._others, self._compared):
                damage = Damage(fetch.copy.host_pages)
            found[fetch.key] = damage
            self._compared += 1
        return found

    def _least(self, told: BoardField) -> int:
        return min(self._board.read(rank, told) for rank in self._others)
