"""Computes checksums of pages of a pool on a GPU, on a lane that runs concurrently with the computing stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.pair_plan import RowsPair, Side, StridedRows
from kv_transfer.transport.base import DeviceMemory
from kv_transfer.transport.cuda.blocks import compile_checksums, move_parts
from kv_transfer.transport.cuda.cudart import CudaRuntime, Mark
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages, page_list
from kv_transfer.transport.page_digest import as_digests

_BLOCKS = 1056  # eight per multiprocessor: too short to delay a decode step


class LaterDigests(Sequence[int]):
    """Checksums that are being copied to host memory; readable once their lane has reached the copy."""

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums

    def __len__(self) -> int:
        return self._sums.numel()

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return as_digests(self._sums.tolist())[index]

    def __iter__(self) -> Iterator[int]:
        return iter(as_digests(self._sums.tolist()))


def to_host(sums: Tensor) -> Tensor:
    """Return [n] int64 in pinned memory, valid once the current stream has reached this point."""
    if not sums.is_cuda:
        return sums
    landing = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
    return landing.copy_(sums, non_blocking=True)


class GpuDigests:
    """Computes the checksums of one pool."""

    def __init__(self, cuda: CudaRuntime, memory: DeviceMemory, layout: PoolLayout) -> None:
        self._cuda = cuda
        self._device = memory.device
        self._memory = cuda.tensor(memory.address, memory.nbytes)
        self._lane = cuda.lane(memory.device)
        self._planes = range(len(layout.planes))
        with self._lane.entered():
            self._pages = PagedMemory(layout, self._memory, self._memory.device)
            # This compiles the kernels before the first request.
            padding = page_list([0], device=self._memory.device)
            self._whole(padding).cpu()
            compile_checksums(self._memory, layout)

    def beside(self, side: Side, pages: Sequence[int]) -> tuple[LaterDigests, Mark]:
        """Return the checksums of pages that nothing writes to, and the mark after which they can be read.

        Raises RuntimeError once the GPU has failed.
        """
        with self._lane.entered():
            sums = to_host(self._launch(side, pages))
        return LaterDigests(sums), self._lane.mark()

    @torch.inference_mode()
    def start(self, side: Side, pages: Sequence[int], slot: int) -> tuple[LaterDigests, Mark]:
        """Begin to compute checksums; later launches on the current stream wait until they are computed.

        Raises RuntimeError once the GPU has failed.
        """
        with self._lane.entered():
            sums = self._launch(side, pages)
            if side.state:
                state = self._parts(side.state, page_list([slot], device=self._memory.device))
                sums = torch.cat((sums, state))
            landing = to_host(sums)
        mark = self._lane.mark()
        self._cuda.hold(self._device, mark)
        return LaterDigests(landing), mark

    def now(self, side: Side, pages: Sequence[int]) -> list[int]:
        """Return the checksums. Waits for the GPU, but briefly: this lane has priority over the model's stream."""
        with self._lane.entered():
            return as_digests(self._launch(side, pages).cpu().tolist())

    def state(self, side: Side, slot: int) -> int:
        """Return the checksum of one state slot; waits like `now`."""
        with self._lane.entered():
            index = page_list([slot], device=self._memory.device)
            return as_digests(self._parts(side.state, index).cpu().tolist())[0]

    def _launch(self, side: Side, pages: Sequence[int]) -> Tensor:
        index = page_list(pages, device=self._memory.device)
        return self._whole(index) if side.whole else self._parts(side.pages, index)

    def _whole(self, index: Tensor) -> Tensor:
        sums = torch.zeros(index.size(1), dtype=torch.int64, device=self._memory.device)
        move_pages(self._pages, None, index, sums, self._planes, _BLOCKS)
        return sums

    def _parts(self, blocks: Sequence[StridedRows], index: Tensor) -> Tensor:
        sums = torch.zeros(index.size(1), dtype=torch.int64, device=self._memory.device)
        move_parts(self._memory, None, [RowsPair(block, block) for block in blocks], index, sums, _BLOCKS)
        return sums
