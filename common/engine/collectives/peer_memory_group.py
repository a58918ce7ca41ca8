"""Collectives of GPUs that map each other's memory: one kernel for small sums, another group for everything else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from common.engine.collectives.group import CollectiveGroup
from common.engine.ops.peer_reduce import (
    PEER_BYTES,
    RankMemories,
    peer_sum_rms_norm_triton,
    peer_sum_triton,
)
from common.errors import RankFailed

MOST_BYTES = 64 << 10  # of a sum; every rank reads the rows of all others, which is too much of larger ones
POLLS_PER_SECOND = 1_000_000  # about as often a program looks for another rank's turn
MAX_POLLS = 2**31 - 1


class PeerAllocator(Protocol):
    """Allocations that other processes map; `CudaRuntime` of kv_transfer/transport/cuda/cudart.py is one.

    Raises RuntimeError for what the driver refuses.
    """

    def malloc(self, device: int, nbytes: int) -> int:
        """Return the address of zeroed memory on this GPU."""
        ...

    def free(self, device: int, address: int) -> None: ...
    def export(self, address: int) -> bytes:
        """Return a handle of the allocation, of the same length on every rank."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for kernels of `device` and return its address."""
        ...

    def close(self, device: int, address: int) -> None:
        """Unmap it."""
        ...


class PeerMemoryGroup(CollectiveGroup):
    """A rank's end of a group whose GPUs are connected by NVLink or PCIe.

    Every rank makes its end at the same time. A kernel that has waited too long for another rank computes nonsense,
    which `check` reports.

    Args:
        host: the same ranks on the host, which exchange their handles through it.
        large: the same ranks; takes what the kernel does not.
        timeout: seconds that a kernel waits for the other ranks, approximately.
    """

    def __init__(
        self,
        host: CollectiveGroup,
        large: CollectiveGroup,
        allocator: PeerAllocator,
        device: torch.device,
        timeout: float,
    ) -> None:
        super().__init__(host.shard)
        self._large, self._allocator, self._index = large, allocator, device.index or 0
        self._own = allocator.malloc(self._index, PEER_BYTES)
        handle = allocator.export(self._own)
        given = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
        handles = host.all_gather(given, host.shard.size * len(handle)).view(host.shard.size, len(handle))
        addresses = [
            self._own if rank == host.shard.rank else allocator.open(self._index, bytes(each.tolist()))
            for rank, each in enumerate(handles)
        ]
        self._mapped = [each for each in addresses if each != self._own]
        self._memory = RankMemories(
            torch.tensor(addresses, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
            host.shard.rank,
            min(int(timeout * POLLS_PER_SECOND), MAX_POLLS),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._takes(x):
            return self._large.all_reduce(x)
        return peer_sum_triton(x, self._memory)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not self._takes(x):
            return self._large.all_reduce_norm(x, residual, weight, eps)
        return peer_sum_rms_norm_triton(x, residual, weight, eps, self._memory)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        return self._large.all_gather(x, columns)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._large.broadcast(x, source)

    def check(self) -> None:
        self._large.check()
        failed = int(self._memory.failed[0])
        if failed:
            raise RankFailed(failed - 1, f"the GPU of rank {failed - 1} has not answered; restart the node")

    def close(self) -> None:
        """Unmap the memory of the other ranks and free this one's. No kernel of any rank runs any more."""
        for address in self._mapped:
            self._allocator.close(self._index, address)
        self._mapped.clear()
        if self._own:
            self._allocator.free(self._index, self._own)
        self._own = 0

    def _takes(self, x: Tensor) -> bool:
        floats = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return floats and x.nbytes <= MOST_BYTES and self._memory.holds(x.flatten(0, -2))
