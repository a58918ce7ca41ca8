"""Host memory of a decode node with several ranks: each copies its share by the same plans, and rank 0 decides for all.

Rank 0 takes pages for stored, and fetched ones for intact, only once the other ranks have shown so on the board. Stores
and fetches are counted in the order of the plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from common.kv_cache.host_plan import Damage, HostFetch
from common.node.ranks.board import Board, Told
from decode_node.host_fetches import HostFetches
from decode_node.step_plan import Moves

SHOWN = 64  # fetches whose verdicts a rank shows, the newest; more than a node has in progress


class OwnFetches:
    """The copies of one rank, in the order of the plans."""

    def __init__(self, own: HostFetches) -> None:
        self._own = own
        self._stores: deque[int] = deque()  # keys of those that have not ended
        self._fetches: deque[HostFetch] = deque()
        self._early: dict[int, Damage] = {}  # key -> what differed, of fetches that wait for one before them
        self.stored = 0  # stores that have ended

    @property
    def busy(self) -> bool:
        return bool(self._stores or self._fetches)

    def apply(self, moves: Moves) -> None:
        self._own.apply(moves)
        self._stores += (each.key for each in moves.stores)
        self._fetches += moves.fetches

    def look(self) -> None:
        """Count the stores that have ended."""
        if self._stores:
            unfinished = self._own.unfinished()
            while self._stores and self._stores[0] not in unfinished:
                self._stores.popleft()
                self.stored += 1

    def ended(self) -> Iterator[tuple[HostFetch, Damage]]:
        """Yield the fetches that have ended, each once, and what differed."""
        if self._fetches:
            self._early.update(self._own.fetched())
        while self._fetches and self._fetches[0].key in self._early:
            fetch = self._fetches.popleft()
            yield fetch, self._early.pop(fetch.key)


class RankFetches:
    """The copies of a rank other than rank 0, which it shows on the board as they end."""

    def __init__(self, own: HostFetches, tell: Callable[[Told, int], None]) -> None:
        self._copies = OwnFetches(own)
        self._tell = tell
        self._compared = self._damaged = 0

    def apply(self, moves: Moves) -> None:
        self._copies.apply(moves)

    def turn(self) -> bool:
        """Show what has ended. Return whether something has not."""
        if not self._copies.busy:
            return False
        # Checksums of fetches may be those of stores that have just ended.
        self._copies.look()
        for _, damage in self._copies.ended():
            bit = 1 << self._compared % SHOWN
            self._damaged = self._damaged | bit if any(damage) else self._damaged & ~bit
            self._compared += 1
            self._tell(Told.DAMAGED, self._damaged)
            self._tell(Told.COMPARED, self._compared)
        self._tell(Told.STORED, self._copies.stored)
        return self._copies.busy


class FetchedByAll:
    """The `AppliedFetches` of rank 0: a copy ends once it has ended on all ranks."""

    def __init__(self, own: HostFetches, board: Board, size: int) -> None:
        """`size`: number of ranks."""
        self._own = own
        self.copies = OwnFetches(own)  # public for tests
        self._board = board
        self._others = range(1, size)
        self._stores: deque[int] = deque()  # keys of those that have not ended on some other rank
        self._stored = 0  # those that have
        self._fetched: deque[tuple[HostFetch, Damage]] = deque()  # ended here, perhaps not on some other rank
        self._compared = 0  # fetches that have ended on all

    def apply(self, moves: Moves) -> None:
        self.copies.apply(moves)
        self._stores += (each.key for each in moves.stores)

    def unfinished(self) -> Collection[int]:
        self.copies.look()
        for _ in range(self._least(Told.STORED) - self._stored):
            self._stores.popleft()
            self._stored += 1
        return {*self._own.unfinished(), *self._stores}

    def fetched(self) -> Mapping[int, Damage]:
        self._fetched += self.copies.ended()
        found: dict[int, Damage] = {}
        compared = self._least(Told.COMPARED)
        while self._fetched and self._compared < compared:
            fetch, damage = self._fetched.popleft()
            if any(
                self._board.read(rank, Told.DAMAGED) >> self._compared % SHOWN & 1 for rank in self._others
            ):
                damage = Damage(fetch.copy.host_pages)
            found[fetch.key] = damage
            self._compared += 1
        return found

    def _least(self, told: Told) -> int:
        return min(self._board.read(rank, told) for rank in self._others)
