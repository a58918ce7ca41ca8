"""The page table of running requests on the device: row of a request -> its pages in logical order.

Row 0 is reserved padding: it points at page 0. The host queues changes and `flush` applies all of a step in one
indexed write, so that no step makes a copy per request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch


class RequestTable:
    """`pages` is [num_rows + 1, max_pages] int32 on the device."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.pages = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        self._free = deque(range(1, num_rows + 1))
        self._pending: dict[
            tuple[int, int], int
        ] = {}  # (row, logical page) -> page id: each cell once, since
        # one indexed write with a cell twice (a row that changed hands) keeps either value

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        """A free row; IndexError if there is none (ask `free_rows` first)."""
        return self._free.popleft()

    def give_row(self, row: int) -> None:
        """Only after the last step that reads the row has completed. Stale entries stay: lengths guard them."""
        assert 0 < row < len(self.pages), "not a row of a request"
        assert row not in self._free
        self._free.append(row)

    def append(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Queue pages for logical positions first, first+1, ... of the row."""
        self._pending.update({(row, first + index): page for index, page in enumerate(pages)})

    def flush(self) -> None:
        """Apply what was queued. On the device's current stream, so the next step sees it."""
        if not self._pending:
            return
        cells = [(row, logical, page) for (row, logical), page in self._pending.items()]
        changes = torch.tensor(cells, dtype=torch.int64).t()
        if self.pages.is_cuda:
            changes = changes.pin_memory().to(self.pages.device, non_blocking=True)
        self.pages.index_put_((changes[0], changes[1]), changes[2].to(torch.int32))
        self._pending.clear()
