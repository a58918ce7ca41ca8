"""One of two ranks of the kernel that streams rows, as a process: Triton's interpreter is not safe for threads.

python -m tests.fakes.peer_row_ranks DIRECTORY RANK
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.ops import peer_rows
from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.peer_memories import RankMemories, peer_bytes
from common.engine.ops.peer_norm import SumNorm
from common.engine.ops.peer_rows import stream_sum
from tests.fakes import quick_interpreter

RANKS, SIZE, EPS = 2, 24, 1e-5
PROGRAMS = 2


def rank_memories(memory: Tensor, host: Tensor, rank: int, polls: int) -> RankMemories:
    """`memory`: [ranks, bytes], which all ranks share; `host`: [2] int32."""
    return RankMemories(torch.tensor([each.data_ptr() for each in memory]), host, rank, polls)


def shared_memory(directory: Path) -> Tensor:
    """Return the memory of both ranks, [RANKS, bytes], which is a file of this directory. Its first bytes are zeros."""
    size = RANKS * peer_bytes(RANKS)
    return torch.from_file(str(directory / "memory"), True, size, dtype=torch.uint8).view(RANKS, -1)


def sum_rows(rank: int, memory: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make the calls of one rank: call i is `given[str(i)]`, [ranks + 1, rows, SIZE].

    Return [4, rows, SIZE] for each: the sum, the normed rows, the total, and the rows that the codes and scales of the
    quantised form stand for. "host" is what the kernels have told the host.
    """
    setattr(peer_rows, "PROGRAMS", PROGRAMS)  # noqa: B010
    host = torch.zeros(2, dtype=torch.int32)
    ends = rank_memories(memory, host, rank, 1 << 20)
    found = {"host": host}
    for name in sorted(given.keys() - {"weight"}):
        x, residual = given[name][rank], given[name][RANKS]
        places = found[name] = torch.zeros(4, *x.shape)
        stream_sum(x, places[0], ends)
        norm = SumNorm.of(x, residual, given["weight"], EPS)
        stream_sum(x, places[1], ends, norm)
        places[2].copy_(norm.total)
        codes, scales = torch.empty_like(x, dtype=FP8), empty_scales(x, SIZE, blocks=False)
        stream_sum(x, codes, ends, norm._replace(scales=scales))
        places[3].copy_(codes.float() * scales)
    return found


def main(directory: Path, rank: int) -> None:
    quick_interpreter.install()
    found = sum_rows(rank, shared_memory(directory), load_file(directory / "given"))
    save_file(found, directory / str(rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
