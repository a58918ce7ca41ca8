"""Runs a benchmark on the ranks of a node, one GPU each: every rank is a process that runs the same program.

Rank 0 is the program that was called. It starts itself once more per rank with `--rank ENDPOINT` after its own
arguments; the other ranks print nothing.

    with joined("tests.bench.engine", options.ranks, options.rank, options.device) as here:
        ...  # here.ranks, here.device, here.first
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
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.node.ranks.device_group import RankCollectives
from common.observability.logs import Log
from kv_transfer.transport.cuda.cudart import CudaRuntime

SECONDS = 300.0  # for a rank to reach a collective that the others wait in
END_SECONDS = 60.0
BYTES = 512  # of what a rank gives in an exchange


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


@contextmanager
def joined(module: str, size: int, endpoint: str | None, device: str) -> Iterator[Here]:
    """Start the other ranks of `module`, connect this one with them, and wait for their end.

    Args:
        size: number of ranks; with one there is no group.
        endpoint: this rank's, if another process has started it.
        device: of rank 0; on a GPU every other rank has the device of its number.

    Raises RuntimeError if another rank has failed.
    """
    if size == 1:
        yield Here(ONE_RANK, torch.device(device), True)
        return
    if endpoint is not None:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            yield from _connected(msgspec.json.decode(endpoint, type=GroupEndpoint), device)
        return
    own, *others = open_endpoints(size)
    processes = start_ranks(module, others)
    try:
        yield from _connected(own, device)
        failed = [number for number, each in enumerate(processes, 1) if each.wait(END_SECONDS)]
        if failed:
            raise RuntimeError(f"ranks {failed} have failed")
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
