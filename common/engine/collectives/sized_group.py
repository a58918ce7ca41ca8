"""Collectives that take one of two ways, by the size of what a rank gives."""

from __future__ import annotations

import sys

from torch import Tensor

from common.engine.collectives.group import CollectiveGroup, DeviceGroup
from common.engine.ops.peer_memories import ROW_BYTES

# Bytes of a tensor up to which two ranks take the one-shot kernels of peer memory. Every rank sends its tensor to all
# others, so the limit falls with the number of ranks. Measured on H100s with NVLink (tests/bench/all_reduce.py).
TWO_RANKS_BYTES = 2 << 20


def max_small_bytes(ranks: int) -> int:
    """Return the limit for a number of ranks."""
    return TWO_RANKS_BYTES * 4 // ranks**2


def max_summed_bytes(ranks: int) -> int:
    """Return the limit for sums of whole rows: none for two ranks, which send no more than NCCL's would.

    On H200s streamed rows took two ranks 13 us instead of NCCL's 31 for 2 MiB, and 445 instead of 660 for 128 MiB, with
    the norm. More ranks were not measured.
    """
    return sys.maxsize if ranks == 2 else max_small_bytes(ranks)


class SizedGroup(CollectiveGroup):
    """Gives small tensors to `small` and others to `large`, which join the same ranks.

    The choice depends on shapes only, so that all ranks make the same one.
    """

    def __init__(self, small: CollectiveGroup, large: CollectiveGroup) -> None:
        super().__init__(small.shard)
        self._small, self._large = small, large
        self._most = max_small_bytes(small.shard.size)
        self._most_summed = max_summed_bytes(small.shard.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._summing(x).all_reduce(x)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._summing(x).all_reduce_norm(x, residual, weight, eps)

    def all_reduce_fp8_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._summing(x).all_reduce_fp8_norm(x, residual, weight, eps, blocks)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """Return the x of all ranks; the choice depends on `columns`, since the widths of ranks may differ."""
        widest = x.numel() // max(x.shape[-1], 1) * -(-columns // self.shard.size) * x.itemsize
        return (self._small if widest <= self._most else self._large).all_gather(x, columns)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._of(x).broadcast(x, source)

    def check(self) -> None:
        self._small.check()
        self._large.check()

    def close(self) -> None:
        self._small.close()
        self._large.close()

    def _summing(self, x: Tensor) -> CollectiveGroup:
        whole_rows = x.shape[-1] * x.itemsize <= ROW_BYTES
        return self._small if x.nbytes <= (self._most_summed if whole_rows else self._most) else self._large

    def _of(self, x: Tensor) -> CollectiveGroup:
        return self._small if x.nbytes <= self._most else self._large


class SizedDeviceGroup(SizedGroup, DeviceGroup):
    """Two groups of GPUs, by the size of tensors."""

    def __init__(self, small: DeviceGroup, large: DeviceGroup) -> None:
        super().__init__(small, large)
        self._ways = small, large
        self._fake = SizedGroup(small.fake, large.fake)

    @property
    def fake(self) -> SizedGroup:
        return self._fake

    def abandon(self, rank: int) -> None:
        for each in self._ways:
            each.abandon(rank)
