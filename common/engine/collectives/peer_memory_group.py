"""Collectives of GPUs that map each other's memory: every one is a kernel over that memory, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.engine.collectives.group import CollectiveGroup, DeviceGroup, gather_columns, rank_ended
from common.engine.ops.peer_memories import RankMemories, peer_bytes
from common.engine.ops.peer_reduce import (
    peer_gather_triton,
    peer_sum_fp8_rms_norm_triton,
    peer_sum_rms_norm_triton,
    peer_sum_triton,
)
from common.errors import RankFailed
from common.kv_cache.shard import Shard

POLLS_PER_SECOND = 1_000_000  # about as often a program looks for another rank's turn
MAX_POLLS = 2**31 - 1


class PeerAllocator(Protocol):
    """Allocations that other processes map; `CudaRuntime` of kv_transfer/transport/cuda/cudart.py is one.

    Raises RuntimeError for what the driver refuses.
    """

    def malloc(self, device: int, nbytes: int) -> int:
        """Return the address of zeroed memory on this GPU."""
        ...

    def export(self, address: int) -> bytes:
        """Return a handle of the allocation, of the same length on every rank."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for kernels of `device` and return its address."""
        ...


class PeerMemoryGroup(DeviceGroup):
    """A rank's end of a group whose GPUs are connected by NVLink or PCIe, or are one GPU.

    Every rank sends its rows to all others, so that large tensors of more than two ranks are better given to another
    group. The memory ends with the process, since another rank may still be writing to it.
    """

    def __init__(self, shard: Shard, memory: RankMemories, fake: PeerMemoryGroup | None = None) -> None:
        """Exchange rows through `memory`. Without `fake` this group is one itself."""
        super().__init__(shard)
        self.memory = memory
        self._fake = fake or self

    @classmethod
    def connect(
        cls, host: CollectiveGroup, allocator: PeerAllocator, device: torch.device, timeout: float
    ) -> PeerMemoryGroup:
        """Make this rank's end. Every rank does so at the same time.

        Args:
            host: the same ranks on the host, which exchange their handles through it.
            timeout: seconds that a kernel waits for the other ranks, approximately.
        """
        index, shard = device.index or 0, host.shard
        nbytes = peer_bytes(shard.size)
        own = allocator.malloc(index, nbytes)
        handle = allocator.export(own)
        given = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
        handles = host.all_gather(given, shard.size * len(handle)).view(shard.size, len(handle))
        addresses = [
            own if rank == shard.rank else allocator.open(index, bytes(each.tolist()))
            for rank, each in enumerate(handles)
        ]
        polls = min(int(timeout * POLLS_PER_SECOND), MAX_POLLS)
        nowhere = [allocator.malloc(index, nbytes)] * shard.size
        warm_up = cls(shard, _memories(nowhere, shard, device, polls=0))
        return cls(shard, _memories(addresses, shard, device, polls), warm_up)

    @property
    def fake(self) -> PeerMemoryGroup:
        return self._fake

    def all_reduce(self, x: Tensor) -> Tensor:
        return peer_sum_triton(x, self.memory)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not self.memory.fits(x):
            return super().all_reduce_norm(x, residual, weight, eps)
        return peer_sum_rms_norm_triton(x, residual, weight, eps, self.memory)

    def all_reduce_fp8_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.memory.fits(x):
            return super().all_reduce_fp8_norm(x, residual, weight, eps, blocks)
        return peer_sum_fp8_rms_norm_triton(x, residual, weight, eps, blocks, self.memory)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        return gather_columns(x, self.shard, columns, self._gather)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._gather(x)[source].clone()

    def check(self) -> None:
        failed, lost = self.memory.host.tolist()
        if lost:
            raise rank_ended(lost - 1)
        if failed:
            raise RankFailed(failed - 1, f"the GPU of rank {failed - 1} has not answered; restart the node")

    def abandon(self, rank: int) -> None:
        self.memory.host[1] = rank + 1

    def close(self) -> None:
        """No-op: the memory ends with the process, and kernels of other ranks give up once that is noticed."""

    def _gather(self, x: Tensor) -> tuple[Tensor, ...]:
        return peer_gather_triton(x, self.memory).unbind()


def _memories(addresses: Sequence[int], shard: Shard, device: torch.device, polls: int) -> RankMemories:
    host = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
    return RankMemories(torch.tensor(addresses, device=device), host, shard.rank, polls)
