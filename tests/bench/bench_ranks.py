"""Runs a benchmark on the ranks of a node, one GPU each: every rank is a process that runs the same program.

Rank 0 is the program that was called. It starts itself once more per rank with `--rank ENDPOINT` after its own
arguments; the other ranks print nothing.

    with joined("tests.bench.engine", options) as here:
        ...  # here.ranks, here.device, here.first

With `--share N` there is one process, which has the share of rank 0 of N. Its sums send and await rows as those of N
ranks do, in its own memory, so they lack the time over the link and that of waiting for slower ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import msgspec
import torch

from common.engine.collectives.endpoints import GroupEndpoint, open_endpoints
from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.peer_memory_group import PeerMemoryGroup
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.collectives.sized_group import SizedGroup
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.ops.peer_memories import SENDER_BYTES, RankMemories, peer_bytes
from common.kv_cache.shard import Shard
from common.node.ranks.device_group import RankCollectives
from common.observability.logs import Log
from kv_transfer.transport.cuda.cudart import CudaRuntime

SECONDS = 300.0  # for a rank to reach a collective that the others wait in
END_SECONDS = 60.0
BYTES = 512  # of what a rank gives in an exchange
POLLS = 1 << 20  # of a kernel for rows that it has written itself


@dataclass(frozen=True, slots=True)
class Here:
    """This process among the ranks."""

    ranks: Ranks
    device: torch.device
    first: bool  # rank 0, which reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `joined` takes."""
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model, cuda:0 and up")
    parser.add_argument("--rank", help="endpoint of a rank that this program has started")
    parser.add_argument("--share", type=int, help="measure the share of one of so many ranks, by itself")


@contextmanager
def joined(module: str, options: argparse.Namespace) -> Iterator[Here]:
    """Start the other ranks of `module`, connect this one with them, and wait for their end.

    Args:
        options: has `device`, that of rank 0, and what `add_arguments` adds. On a GPU every other rank has the device
            of its number.

    Raises RuntimeError if another rank has failed, and ValueError if ranks and a share are asked for.
    """
    device = torch.device(options.device)
    if options.share is not None:
        if options.ranks > 1:
            raise ValueError("--share is one process: leave out --ranks")
        yield Here(GroupRanks(echo_group(Shard(0, options.share), device)), device, True)
        return
    if options.ranks == 1:
        yield Here(ONE_RANK, device, True)
        return
    if options.rank is not None:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            yield from _connected(msgspec.json.decode(options.rank, type=GroupEndpoint), options.device)
        return
    own, *others = open_endpoints(options.ranks)
    processes = start_ranks(module, others)
    try:
        yield from _connected(own, options.device)
        failed = [number for number, each in enumerate(processes, 1) if each.wait(END_SECONDS)]
        if failed:
            raise RuntimeError(f"ranks {failed} have failed")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def echo_group(shard: Shard, device: torch.device) -> CollectiveGroup:
    """Return a group of one rank that finds its own rows wherever it looks for those of the others."""
    alone = FakeGroup(shard)
    if device.type != "cuda":
        return alone
    memory = torch.zeros(peer_bytes(shard.size), dtype=torch.uint8, device=device)
    # Rank 0's part of the memory of a rank is that rank's part of this memory.
    parts = [memory.data_ptr() + rank * SENDER_BYTES for rank in range(shard.size)]
    host = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    addresses = torch.tensor(parts, device=device)
    return SizedGroup(EchoGroup(shard, RankMemories(addresses, host, 0, POLLS), memory), alone)


class EchoGroup(PeerMemoryGroup):
    """The group of peer memory over one allocation, which it keeps."""

    def __init__(self, shard: Shard, memories: RankMemories, memory: torch.Tensor) -> None:
        super().__init__(shard, memories)
        self._allocation = memory


def start_ranks(module: str, endpoints: Sequence[GroupEndpoint]) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of these endpoints with the arguments of this process."""
    processes = []
    for endpoint in endpoints:
        rank = msgspec.json.encode(endpoint).decode()
        command = [sys.executable, "-m", module, *sys.argv[1:], "--rank", rank]
        processes.append(subprocess.Popen(command, pass_fds=endpoint.descriptors))
        endpoint.close()
    return processes


def _connected(endpoint: GroupEndpoint, name: str) -> Iterator[Here]:
    host = SharedMemoryGroup(endpoint, SECONDS)
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", endpoint.rank)
        torch.cuda.set_device(device)

    def exchange(own: bytes) -> Sequence[bytes]:
        row = torch.frombuffer(bytearray(own.ljust(BYTES, b"\0")), dtype=torch.uint8)
        every = host.all_gather(row[None], endpoint.size * BYTES).view(endpoint.size, BYTES)
        return [bytes(each.tolist()).rstrip(b"\0") for each in every]

    collectives = RankCollectives(host)
    collectives.connect(device, CudaRuntime, exchange, Log("bench"))
    try:
        yield Here(GroupRanks(collectives.group), device, endpoint.rank == 0)
        collectives.group.check()
    finally:
        collectives.close()
