"""Allocates rows of the batch and collects the device changes that the next plan must apply."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from common.kv_cache.host_plan import HostFetch, Store
from decode_node.step_plan import Join, Load, Moves, Save


class BatchRows:
    """Rows 1 .. num_rows; row 0 is padding. Device tables and relay rows change only through plans."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = deque(range(1, num_rows + 1))
        self._stores: list[Store] = []
        self._fetches: list[HostFetch] = []
        self._saves: list[Save] = []
        self._joins: list[Join] = []
        self._loads: list[Load] = []
        self._forgotten: list[int] = []
        # (row, logical page) -> page id. A cell that changes several times is written once, with its last value.
        self._cells: dict[tuple[int, int], int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a free row. Raises IndexError if there is none; check `free` first."""
        return self._free.popleft()

    def give(self, row: int) -> None:
        """Free a row, once the last plan that reads it has been read.

        Stale cells remain; sequence lengths mask them.
        """
        assert 0 < row <= self._num_rows, "not a row of a request"
        assert row not in self._free
        self._free.append(row)

    def append(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Set the page ids at logical positions first, first+1, ... of the row."""
        self._cells.update({(row, first + index): page for index, page in enumerate(pages)})

    def join(self, join: Join) -> None:
        self._joins.append(join)

    @property
    def joining(self) -> bool:
        """True if a row is joined by no plan yet."""
        return bool(self._joins)

    @property
    def waiting_stores(self) -> Collection[int]:
        """The keys of stores that are in no plan yet."""
        return [each.key for each in self._stores]

    def store(self, store: Store) -> None:
        self._stores.append(store)

    def fetch(self, fetch: HostFetch) -> None:
        self._fetches.append(fetch)

    def save(self, save: Save) -> None:
        self._saves.append(save)

    def load(self, load: Load) -> None:
        self._loads.append(load)

    def forget(self, key: int) -> None:
        """Drop the backup that is stored under the key."""
        self._forgotten.append(key)

    def take_moves(self) -> Moves:
        """Return and clear all changes since the last call."""
        rows = self.take_rows()
        moves = Moves(
            stores=tuple(self._stores),
            fetches=tuple(self._fetches),
            saves=tuple(self._saves),
            joins=rows.joins,
            loads=tuple(self._loads),
            forget=tuple(self._forgotten),
            cells=rows.cells,
        )
        for taken in (self._stores, self._fetches, self._saves, self._loads, self._forgotten):
            taken.clear()
        return moves

    def take_rows(self) -> Moves:
        """Return and clear joins and cells, which need not wait for other pending changes."""
        cells = tuple((row, logical, page) for (row, logical), page in self._cells.items())
        moves = Moves(joins=tuple(self._joins), cells=cells)
        self._joins.clear()
        self._cells.clear()
        return moves
