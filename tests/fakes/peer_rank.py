"""One rank of a `PeerMemoryGroup` as a process: on a GPU, or over host memory with Triton's interpreter.

    python -m tests.fakes.peer_rank ENDPOINT DEVICE

Draws rows, sums, norms and gathers them with the other ranks in calls of different sizes, and exits with 0 if all equal
the references. On a GPU it also replays a graph, and rank 1 does not come to a call, which the others have to notice.
At last rank 1 leaves while the others wait for it. Several ranks may share a GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.engine.collectives.endpoints import GroupEndpoint
from common.engine.collectives.group import (
    CollectiveGroup,
    DeviceGroup,
    all_gather,
    all_reduce,
    all_reduce_fp8_norm,
    all_reduce_norm,
    broadcast,
    capturing,
)
from common.engine.collectives.peer_memory_group import PeerMemoryGroup
from common.engine.collectives.process_group import ProcessGroupCollectives
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.collectives.sized_group import SizedDeviceGroup
from common.engine.ops import peer_memories
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.ops.peer_reduce import peer_sum_reference, peer_sum_rms_norm_reference
from common.errors import RankFailed
from common.kv_cache.shard import Shard
from common.node.ranks.device_group import LostRankWatch
from kv_transfer.transport.cuda.cudart import CudaRuntime
from tests.fakes import quick_interpreter

# Rows and their size; more than 64 rows, and rows that end within a word, are streamed.
CALLS = [
    (3, 48),
    (1, 64),
    (5, 32),
    (2, 48),
    (65, 8),
    (5, 64),
    (1, 48),
    (700, 1024),
    (300, 48),
    (3, 33),
    (9, 2048),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What Triton's interpreter computes in seconds: places are used again with more rows, fewer, and other rows.
HOST_CALLS = [(3, 48), (1, 64), (2, 32), (3, 64)]
HANDLE_BYTES = 64


class HostAllocator:
    """A `PeerAllocator` over host memory: a handle is the path of a descriptor of its process."""

    def __init__(self) -> None:
        self._maps: dict[int, Tensor] = {}
        self._descriptors: dict[int, int] = {}

    def malloc(self, device: int, nbytes: int) -> int:
        descriptor = os.memfd_create("peer")
        os.truncate(descriptor, nbytes)
        address = self._map(descriptor)
        self._descriptors[address] = descriptor
        return address

    def export(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._descriptors[address]}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        descriptor = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        address = self._map(descriptor)
        os.close(descriptor)
        return address

    def _map(self, descriptor: int) -> int:
        found = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        self._maps[found.data_ptr()] = found
        return found.data_ptr()


def drawn(rank: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def check_calls(
    group: CollectiveGroup,
    device: torch.device,
    calls: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Compare the group's results with the references; every rank calls this."""
    number, own, size = group.number, group.shard.rank, group.shard.size
    for call, shape in enumerate(calls):
        for dtype in dtypes:
            parts = [drawn(rank, call, shape, dtype).to(device) for rank in range(size)]
            residual = drawn(8, call, shape, dtype).to(device)
            weight = drawn(9, call, shape, torch.float32)[0].to(device)
            assert torch.equal(all_reduce(parts[own], number), peer_sum_reference(parts))
            normed, total = all_reduce_norm(parts[own], residual, weight, 1e-5, number)
            expected = peer_sum_rms_norm_reference(parts, residual, weight, 1e-5)
            torch.testing.assert_close(normed, expected[0], atol=2e-2, rtol=1e-2)
            assert torch.equal(total, expected[1])
            for blocks in (False, True):
                codes, scales, total = all_reduce_fp8_norm(parts[own], residual, weight, 1e-5, blocks, number)
                assert torch.equal(total, expected[1])
                check_codes(codes, scales, expected[0], blocks)
            joined = torch.cat(parts, dim=-1)
            assert torch.equal(all_gather(parts[own], number, joined.shape[-1]), joined)
            assert torch.equal(broadcast(parts[own], number, 1), parts[1])
    group.check()


def check_codes(codes: Tensor, scales: Tensor, normed: Tensor, blocks: bool) -> None:
    """Compare codes with those of normed rows, which may be rounded in the other direction here and there."""
    expected = quantize_rows_reference(normed, blocks)
    assert scales.stride() == expected[1].stride()
    torch.testing.assert_close(scales, expected[1], rtol=1e-2, atol=0.0)
    steps = (codes.float() - expected[0].float()).abs() / expected[0].float().abs().clamp(min=2**-6)
    assert steps.max() <= 0.126
    assert (steps > 0).float().mean() < 0.15


def check_large(group: CollectiveGroup, device: torch.device) -> None:
    """Sum and gather what takes several launches: rows that are longer than those of the memory."""
    own, size, number = group.shard.rank, group.shard.size, group.number
    parts = [drawn(rank, 99, (65, 8200), torch.float32).to(device) for rank in range(size)]
    assert torch.equal(all_reduce(parts[own], number), peer_sum_reference(parts))
    # The shares of 5 * size + 1 columns.
    odd = [part[:3, : 5 + (rank == size - 1)].half() for rank, part in enumerate(parts)]
    assert torch.equal(all_gather(odd[own], number, 5 * size + 1), torch.cat(odd, dim=-1))
    whole = torch.cat(parts, dim=-1)
    assert torch.equal(all_gather(parts[own], number, whole.shape[-1]), whole)
    group.check()


def check_graph(group: CollectiveGroup, device: torch.device, rows: int) -> None:
    """Replay a graph of three dependent calls of `rows` rows with new inputs."""
    shape, dtype = (rows, 1024), torch.bfloat16
    own, size, number = group.shard.rank, group.shard.size, group.number
    x, residual = torch.zeros(2, *shape, dtype=dtype, device=device)
    weight = torch.ones(shape[1], dtype=dtype, device=device)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        normed, total = all_reduce_norm(x, residual, weight, 1e-5, number)
        for _ in range(2):
            normed, total = all_reduce_norm(normed * (own + 1), total, weight, 1e-5, number)
        return normed, total, all_gather(x[:, :3], number, 3 * size)

    with capturing():
        for _ in range(own + 1):  # as if a capture failed on one rank
            run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = run(x)
    for step in range(20):
        parts = [drawn(rank, step, shape, dtype).to(device) for rank in range(size)]
        x.copy_(parts[own])
        graph.replay()
        expected = peer_sum_rms_norm_reference(parts, residual, weight, 1e-5)
        for _ in range(2):
            both = [expected[0] * (rank + 1) for rank in range(size)]
            expected = peer_sum_rms_norm_reference(both, expected[1], weight, 1e-5)
        torch.testing.assert_close(found[0], expected[0], atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(found[1], expected[1], atol=6e-2, rtol=3e-2)
        assert torch.equal(found[2], torch.cat([part[:, :3] for part in parts], dim=-1))
    group.check()


def check_absence(group: CollectiveGroup, device: torch.device) -> None:
    """Rank 1 does not come, which the kernels of the others notice."""
    if group.shard.rank != 1:
        all_reduce(torch.ones(2, 64, device=device), group.number)
        torch.cuda.synchronize()
        with pytest.raises(RankFailed, match="the GPU of rank 1 has not answered"):
            group.check()


def check_loss(host: SharedMemoryGroup, group: DeviceGroup, device: torch.device) -> None:
    """Rank 1 leaves, and no kernel waits for it any longer, though it could for minutes."""
    if host.shard.rank == 1:
        return
    watch = LostRankWatch(host, group)
    for _ in range(3):
        all_reduce(torch.ones(2, 64, device=device), group.number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        group.check()
    watch.close()


def gloo(store: Any, shard: Shard) -> Any:
    """Make what takes large tensors here: NCCL refuses two ranks on one GPU."""
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, timedelta(seconds=60))


def on_host(host: SharedMemoryGroup, device: torch.device) -> None:
    quick_interpreter.install()
    peer_memories.POLLS_PER_LOOK = 16  # the interpreter is slow
    allocator = HostAllocator()  # keeps the memory
    group = PeerMemoryGroup.connect(host, allocator, device, timeout=60.0)
    if host.shard.rank == 1:  # takes no turn
        alone, columns = group.fake, 5 * host.shard.size
        assert alone.all_reduce(torch.ones(3, 5)).shape == (3, 5)
        assert alone.all_gather(torch.ones(3, 5), columns).shape == (3, columns)
    check_calls(group, device, HOST_CALLS, DTYPES[:1])
    check_calls(group, device, HOST_CALLS[:1], DTYPES[1:2])
    host.all_reduce(torch.zeros(1))  # all have ended their calls
    check_loss(host, group, device)


def on_gpu(host: SharedMemoryGroup, device: torch.device) -> None:
    torch.cuda.set_device(device)
    small = PeerMemoryGroup.connect(host, CudaRuntime(), device, timeout=60.0)  # another rank may compile
    large = ProcessGroupCollectives(host, gloo)
    impatient = PeerMemoryGroup.connect(host, CudaRuntime(), device, timeout=1.0)
    for group in (SizedDeviceGroup(small, large), small):
        check_calls(group, device, CALLS, DTYPES)
        check_large(group, device)
    print(f"rank {host.shard.rank}: {4 * len(CALLS) * 3} sums and norms", flush=True)
    for rows in (4, 1000):
        check_graph(small, device, rows)
    print(f"rank {host.shard.rank}: two graphs were replayed 20 times each", flush=True)
    check_absence(impatient, device)
    print(f"rank {host.shard.rank}: an absent rank was noticed", flush=True)
    torch.cuda.synchronize()
    host.all_reduce(torch.zeros(1))
    large.close()
    check_loss(host, small, device)
    print(f"rank {host.shard.rank}: a lost rank was noticed", flush=True)


def main(endpoint: GroupEndpoint, device: torch.device) -> None:
    host = SharedMemoryGroup(endpoint)
    (on_gpu if device.type == "cuda" else on_host)(host, device)
    host.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=GroupEndpoint), torch.device(sys.argv[2]))
