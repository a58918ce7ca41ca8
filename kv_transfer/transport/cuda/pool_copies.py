"""Copies between host memory and one pool, and checksums of that pool's pages and state slots, on the current stream.

On a CPU both are done when the call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from common.kv_cache.plane import Kept
from common.kv_cache.pool_layout import PoolLayout
from common.observability.logs import Log
from kv_transfer.pair_plan import RowsPair, StridedRows
from kv_transfer.transport.cuda.batch_copy import Addresses
from kv_transfer.transport.cuda.batch_trial import try_batches
from kv_transfer.transport.cuda.blocks import move_parts, words
from kv_transfer.transport.cuda.cudart import CudaRuntime
from kv_transfer.transport.cuda.later_digests import to_host
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages, page_list

# Two per multiprocessor: a forward runs at the same time, and the device reads its memory fast enough.
_BLOCKS: Final = 264


class ItemSums:
    """The checksums of some pages and state slots of a pool, which add up plane by plane."""

    @torch.inference_mode()
    def __init__(self, pool: MovedPool, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._pool = pool
        self._pages = page_list(pages, device=pool.device)
        self._slots = page_list(slots, device=pool.device)
        # Apart, so that kernels get addresses of equal alignment.
        self._of_pages = torch.zeros(len(pages), dtype=torch.int64, device=pool.device)
        self._of_slots = torch.zeros(len(slots), dtype=torch.int64, device=pool.device)

    @torch.inference_mode()
    def add_pages(self) -> None:
        """Add all paged planes."""
        memory = self._pool.memory
        planes = range(sum(len(each.planes) for each in memory.groups))
        move_pages(memory, None, self._pages, self._of_pages, planes, _BLOCKS)

    @torch.inference_mode()
    def add_states(self, planes: Iterable[int]) -> None:
        """Add the planes that are kept per request, each once; skip the others. `planes`: indices in the layout."""
        if not self._slots.size(1):
            return
        for plane in planes:
            part = self._pool.states.get(plane)
            if part is not None:
                block, first = part
                pair = RowsPair(block, block)
                move_parts(self._pool.storage, None, [pair], self._slots, self._of_slots, _BLOCKS, first)

    @torch.inference_mode()
    def on_host(self) -> Tensor:
        """Return [pages + slots] int64, readable once the current stream has reached this point."""
        return to_host(torch.cat((self._of_pages, self._of_slots)))


class MovedPool:
    """One pool: its pages and slots are copied by address, and summed up by id."""

    def __init__(self, layout: PoolLayout, storage: Tensor) -> None:
        """`storage`: [layout.total_bytes] uint8. On a GPU this compiles the kernels, and tries batches of copies."""
        self.storage = storage
        self.device = storage.device
        self.memory = PagedMemory(layout, storage, self.device)
        kept = {
            index: StridedRows(each.offset, each.page_bytes, each.page_bytes, 1, each.page_bytes)
            for index, each in enumerate(layout.placed)
            if each.plane.kept is Kept.PER_REQUEST
        }
        firsts = accumulate((words([block]) for block in kept.values()), initial=0)
        self.states = {index: (block, first) for (index, block), first in zip(kept.items(), firsts)}
        self._cuda = CudaRuntime() if storage.is_cuda else None
        if self._cuda is not None:
            with torch.cuda.device(self.device):
                try_batches(self._cuda, self.device, Log("host memory"))
                unused = self.sums((0,), (0,) if kept else ())
                unused.add_pages()
                unused.add_states(kept)
                unused.on_host()
                torch.cuda.synchronize()

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Start to copy `sizes` bytes between addresses, in any order. Raises CudaError."""
        if self._cuda is not None:
            self._cuda.copy_many(targets, sources, sizes, torch.cuda.current_stream(self.device))
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def sums(self, pages: Sequence[int], slots: Sequence[int]) -> ItemSums:
        return ItemSums(self, pages, slots)
