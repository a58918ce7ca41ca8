"""The page table of running requests on the device: maps a request's row to its pages in logical order.

Row 0 is reserved for padding and points at page 0. All changes of a step are one indexed write, so no step makes one
copy per request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.host_copies import on_device

Cell = tuple[int, int, int]  # (row, logical page, page id)


class PageTable:
    """The page table: `pages` is [num_rows + 1, max_pages] int32 on the device."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.pages = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)

    def write(self, cells: Sequence[Cell]) -> None:
        """Set cells on the device's current stream, so that the next step sees them. Each cell may occur only once.

        An indexed write that names a cell twice keeps an arbitrary one of the values.
        """
        if not cells:
            return
        changes = on_device(cells, self.pages.device).t()
        self.pages.index_put_((changes[0], changes[1]), changes[2].to(torch.int32))
