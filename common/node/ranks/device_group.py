"""The group in which the ranks of a node combine tensors on their devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from common.engine.collectives.group import CollectiveGroup, DeviceGroup
from common.engine.collectives.peer_memory_group import PeerAllocator, PeerMemoryGroup
from common.engine.collectives.process_group import ProcessGroupCollectives, nccl
from common.engine.collectives.shared_memory_group import TIMEOUT, SharedMemoryGroup
from common.engine.collectives.sized_group import SizedDeviceGroup
from common.errors import ConfigError
from common.observability.logs import Log

LOOK_SECONDS = 0.1
FIRST_VALUES = 1 << 20  # of a large tensor, for which NCCL takes another protocol than for a small one
YES, NO = b"yes", b"no"

# Gives this rank's bytes to the others and returns those of all ranks, in their order.
Exchange = Callable[[bytes], Sequence[bytes]]


class PeerRuntime(PeerAllocator, Protocol):
    """The CUDA runtime of this process; `CudaRuntime` of kv_transfer/transport/cuda/cudart.py is one."""

    def uuid(self, device: int) -> str: ...
    def find(self, uuid: str) -> int | None:
        """Return the ordinal of that GPU in this process; None if it is not visible."""
        ...

    def reaches(self, device: int, other: int) -> bool:
        """Return whether kernels of `device` can access memory of `other`."""
        ...


class LostRankWatch:
    """A thread that lets no kernel wait for a rank whose process has ended."""

    def __init__(self, host: SharedMemoryGroup, group: DeviceGroup) -> None:
        self._host = host
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lost-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; call it before either group is closed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            rank = self._host.ended()
            if rank is not None:
                self._group.abandon(rank)
                return


class RankCollectives:
    """The group of a rank: on a CPU over the memory of the host, on a GPU what `device_group` chooses."""

    def __init__(self, host: SharedMemoryGroup) -> None:
        self.group: CollectiveGroup = host
        self._host = host
        self._watch: LostRankWatch | None = None

    def connect(
        self, device: torch.device, runtime: Callable[[], PeerRuntime], exchange: Exchange, log: Log
    ) -> None:
        """Combine tensors on this device from now on. All ranks call it at the same time.

        Raises ConfigError if their GPUs cannot be connected.
        """
        if device.type == "cpu":
            return
        group = device_group(self._host, device, runtime(), exchange, log)
        self.group, self._watch = group, LostRankWatch(self._host, group)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self.group.close()
        self._host.close()


def device_group(
    host: SharedMemoryGroup, device: torch.device, runtime: PeerRuntime, exchange: Exchange, log: Log
) -> DeviceGroup:
    """Return the group of ranks on GPUs; all ranks choose the same.

    Peer memory serves small tensors and NCCL large ones. Where NCCL is missing, or refuses two ranks on one GPU, peer
    memory serves all; where the GPUs cannot map each other's memory, NCCL does.
    """
    index = device.index or 0
    uuids = [each.decode() for each in exchange(runtime.uuid(index).encode())]
    found = [runtime.find(uuid) for uuid in uuids]
    reached = all(other is not None and runtime.reaches(index, other) for other in found)
    mapped = all(each == YES for each in exchange(YES if reached else NO))
    apart = len(set(uuids)) == len(uuids)
    with_nccl = apart and dist.is_nccl_available()
    if not mapped and not with_nccl:
        raise ConfigError(
            "devices",
            "the ranks' GPUs cannot map each other's memory, and this torch has no NCCL; install one that has, or "
            "write one rank per node",
        )
    if not apart and host.shard.rank == 0:
        log.warning(
            "ranks share a GPU: for development only, since they take turns on it", gpus=sorted(set(uuids))
        )
    log.debug("collectives", peer_memory=mapped, nccl=with_nccl)
    if not mapped:
        return _with_nccl(host, device)
    peers = PeerMemoryGroup.connect(host, runtime, device, TIMEOUT)
    return SizedDeviceGroup(peers, _with_nccl(host, device)) if with_nccl else peers


def _with_nccl(host: SharedMemoryGroup, device: torch.device) -> ProcessGroupCollectives:
    """Return a group whose first calls, which connect the GPUs, are over: they may not be part of a capture."""
    group = ProcessGroupCollectives(host, nccl(TIMEOUT, device))
    for count in (1, FIRST_VALUES):
        values = torch.zeros(count, host.shard.size, device=device)
        group.all_reduce(values)
        group.all_gather(values[:, :1], host.shard.size)
        group.broadcast(values, 0)
    return group
