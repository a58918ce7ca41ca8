"""Collectives of torch's process groups: NCCL between the GPUs of a host."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.engine.collectives.group import CollectiveGroup
from common.kv_cache.shard import Shard

PATH_BYTES = 64


class TorchWork(Protocol):
    """A call in progress."""

    def wait(self) -> bool:
        """Make the current stream wait for it; on a CPU, this thread."""
        ...


class TorchGroup(Protocol):
    """The calls of `ProcessGroupNCCL` and `ProcessGroupGloo` that groups use."""

    def allreduce(self, tensors: list[Tensor], /) -> TorchWork: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> TorchWork: ...
    def broadcast(self, tensors: list[Tensor], options: Any, /) -> TorchWork: ...
    def abort(self) -> None: ...


# Makes this rank's end of a process group over a store of torch.
MakeTorchGroup: TypeAlias = Callable[[Any, Shard], TorchGroup]


class ProcessGroupCollectives(CollectiveGroup):
    """A rank's end of a process group of torch. Every rank makes its end at the same time.

    The columns of `all_gather` are shares of `Shard.tokens`. On a GPU no call waits on the host: the watchdog of the
    process group ends the process if a rank does not answer within the timeout of `make`.

    Args:
        host: the same ranks on the host, through which they find each other. Their store has no name in a file system.
    """

    def __init__(self, host: CollectiveGroup, make: MakeTorchGroup) -> None:
        super().__init__(host.shard)
        self._memory = os.memfd_create("tandem-store", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{self._memory}".encode().ljust(PATH_BYTES, b"\0")
        given = host.broadcast(torch.frombuffer(bytearray(path), dtype=torch.uint8), 0)
        place = bytes(given.tolist()).rstrip(b"\0").decode()
        store = dist.FileStore(place, host.shard.size)  # type: ignore[attr-defined]  # missing in torch's stubs
        self._group = make(store, host.shard)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        size = self.shard.size
        widths = [len(Shard(rank, size).tokens(columns)) for rank in range(size)]
        assert x.shape[-1] == widths[self.shard.rank], f"{x.shape[-1]} columns of {widths}"
        padded = F.pad(x, (0, max(widths) - x.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(size)]
        self._group.allgather([parts], [padded]).wait()
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        sent = x.clone(memory_format=torch.contiguous_format)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([sent], options).wait()
        return sent

    def check(self) -> None:
        """No-op: the watchdog of the process group ends the process."""

    def close(self) -> None:
        self._group.abort()
        os.close(self._memory)


def nccl(timeout: float, device: torch.device) -> MakeTorchGroup:
    """Return what makes a process group over NCCL, whose calls may take `timeout` seconds on the GPU.

    Its ranks connect over loopback, and it uses no NVLink multicast.
    """

    def make(store: Any, shard: Shard) -> TorchGroup:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        made = dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
        made.eager_connect_single_device(device)  # not inside the first capture
        return made  # type: ignore[return-value]  # torch's stub has none of its calls

    return make
