"""A rank that sums over its group without an end: `python -m tests.fakes.summing_rank ENDPOINT SECONDS`."""

from __future__ import annotations

import sys

import msgspec
import torch

from common.engine.collectives.endpoints import GroupEndpoint
from common.engine.collectives.shared_memory_group import SharedMemoryGroup


def main(endpoint: GroupEndpoint, timeout: float) -> None:
    group = SharedMemoryGroup(endpoint, timeout)
    while True:
        group.all_reduce(torch.arange(100_000.0) * endpoint.rank)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=GroupEndpoint), float(sys.argv[2]))
