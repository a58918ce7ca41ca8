"""Two ranks of the kernel of tests/bench/peer_rows.py, in processes: Triton's interpreter is not safe for threads."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.bench import peer_rows
from tests.bench.peer_rows import RowMemories, peer_rows_norm

RANKS, MAX_ROWS, SIZE, EPS = 2, 16, 24, 1e-5
PROGRAMS = 2


def row_memories(memory: Tensor, host: Tensor, rank: int, polls: int) -> RowMemories:
    """`memory`: [ranks, bytes], which all ranks share; `host`: [1] int32, the rank that did not come, plus one."""
    addresses = torch.tensor([each.data_ptr() for each in memory])
    return RowMemories(addresses, host, rank, polls, MAX_ROWS, SIZE, torch.float32)


def sum_rows(
    rank: int, memory: Tensor, host: Tensor, calls: list[Tensor], weight: Tensor, found: list[Tensor]
) -> None:
    """Make the calls of one rank. Call i is `calls[i]`, [ranks + 1, rows, SIZE]; its two results go to `found[i]`."""
    setattr(peer_rows, "multiprocessors", lambda device: PROGRAMS)  # noqa: B010
    ends = row_memories(memory, host, rank, 1 << 20)
    for call, results in zip(calls, found, strict=True):
        for result, place in zip(
            peer_rows_norm(call[rank], call[RANKS], weight, EPS, ends), results[rank], strict=True
        ):
            place.copy_(result)
