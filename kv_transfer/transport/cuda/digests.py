"""Computes checksums of pages of a pool on a GPU, on a lane that runs concurrently with the computing stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.pair_plan import RowsPair, Side, StridedRows
from kv_transfer.transport.base import DeviceMemory
from kv_transfer.transport.cuda.blocks import compile_checksums, move_parts
from kv_transfer.transport.cuda.cudart import CudaRuntime, Mark
from kv_transfer.transport.cuda.digest_buffers import BufferedDigests, DigestBuffers
from kv_transfer.transport.cuda.later_digests import LandingDigests, LaterDigests, to_host
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages, page_list
from kv_transfer.transport.page_digest import as_digests

_BLOCKS = 1056  # eight per multiprocessor: too short to delay a decode step


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
            sums = self._zeros(padding)
            move_pages(self._pages, None, padding, sums, self._planes, _BLOCKS)
            sums.cpu()
            compile_checksums(self._memory, layout)
            self._buffers = DigestBuffers(layout.num_pages, self._memory.device)

    def beside(self, side: Side, pages: Sequence[int]) -> tuple[LaterDigests, Mark]:
        """Return the checksums of pages that nothing writes to, and the mark after which they can be read.

        Raises RuntimeError once the GPU has failed.
        """
        with self._lane.entered():
            sums = to_host(self._launch(side, pages))
        return LandingDigests(sums), self._lane.mark()

    @torch.inference_mode()
    def start(self, side: Side, pages: Sequence[int], slot: int) -> tuple[LaterDigests, Mark]:
        """Begin to compute checksums; later launches on the current stream wait until they are computed.

        Raises RuntimeError once the GPU has failed, or MemoryError.
        """
        count = len(pages)
        with self._lane.entered():
            buffer = self._buffers.take(count)
            buffer.load(pages, slot)
            self._add(side, *buffer.pages(count))
            if side.state:
                self._add_parts(side.state, *buffer.state())
            buffer.land()
        mark = self._lane.mark()
        self._cuda.hold(self._device, mark)
        return BufferedDigests(self._buffers, buffer, count, bool(side.state)), mark

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
        sums = self._zeros(index)
        self._add(side, index, sums)
        return sums

    def _parts(self, blocks: Sequence[StridedRows], index: Tensor) -> Tensor:
        sums = self._zeros(index)
        self._add_parts(blocks, index, sums)
        return sums

    def _zeros(self, index: Tensor) -> Tensor:
        return torch.zeros(index.size(1), dtype=torch.int64, device=self._memory.device)

    def _add(self, side: Side, index: Tensor, sums: Tensor) -> None:
        """Add the checksums of pages `index` [1, n] int32 to `sums` [n] int64."""
        if side.whole:
            move_pages(self._pages, None, index, sums, self._planes, _BLOCKS)
        else:
            self._add_parts(side.pages, index, sums)

    def _add_parts(self, blocks: Sequence[StridedRows], index: Tensor, sums: Tensor) -> None:
        move_parts(self._memory, None, [RowsPair(block, block) for block in blocks], index, sums, _BLOCKS)
