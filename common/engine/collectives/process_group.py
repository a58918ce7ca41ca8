"""Collectives of torch's process groups: NCCL between the GPUs of a host."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group import CollectiveGroup, DeviceGroup, gather_columns, rank_ended
from common.kv_cache.shard import Shard

PATH_BYTES = 64


class TorchWork(Protocol):
    """A call in progress."""

    def wait(self) -> bool:
        """Make the current stream wait for it; on a CPU, this thread."""
        ...


class TorchGroup(Protocol):
    """The calls of `ProcessGroupNCCL` and `ProcessGroupGloo` that groups use.

    A call returns None if it runs on the current stream, as NCCL's do without `asyncOp`.
    """

    def allreduce(self, tensors: list[Tensor], options: Any, /) -> TorchWork | None: ...
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any, /
    ) -> TorchWork | None: ...
    def broadcast(self, tensors: list[Tensor], options: Any, /) -> TorchWork | None: ...
    def abort(self) -> None: ...


# Makes this rank's end of a process group over a store of torch.
MakeTorchGroup: TypeAlias = Callable[[Any, Shard], TorchGroup]


class ProcessGroupCollectives(DeviceGroup):
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
        self._lost: int | None = None  # a rank that has ended
        self._fake = FakeGroup(self.shard)

    @property
    def fake(self) -> FakeGroup:
        return self._fake

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        _finish(self._group.allreduce([total], _on_the_current_stream(AllreduceOptions())))
        return total

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        return gather_columns(x, self.shard, columns, self._gather)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        sent = x.clone(memory_format=torch.contiguous_format)
        options = _on_the_current_stream(BroadcastOptions())
        options.rootRank = source
        _finish(self._group.broadcast([sent], options))
        return sent

    def check(self) -> None:
        if self._lost is not None:
            raise rank_ended(self._lost)

    def abandon(self, rank: int) -> None:
        self._lost = rank
        self._group.abort()

    def close(self) -> None:
        if self._lost is None:
            self._group.abort()
        os.close(self._memory)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        _finish(self._group.allgather([parts], [x], _on_the_current_stream(AllgatherOptions())))
        return parts


def _on_the_current_stream(options: Any) -> Any:
    """Return the options of a call that uses no stream of its own: a graph would fork and join for each of them."""
    options.asyncOp = False
    return options


def _finish(work: TorchWork | None) -> None:
    if work is not None:
        work.wait()


def nccl(timeout: float, device: torch.device) -> MakeTorchGroup:
    """Return what makes a process group over NCCL, whose calls may take `timeout` seconds on the GPU.

    Its ranks connect over loopback, all of them now, and it uses no NVLink multicast.
    """

    def make(store: Any, shard: Shard) -> TorchGroup:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # Otherwise an algorithm that is used for the first time connects then, and in a capture it would wait for the
        # other ranks, whose capture may have failed.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        made = dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
        made.eager_connect_single_device(device)  # not inside the first capture
        return made  # type: ignore[return-value]  # torch's stub has none of its calls

    return make
