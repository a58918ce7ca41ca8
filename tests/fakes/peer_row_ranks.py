"""Two ranks of the kernel that streams rows, in processes: Triton's interpreter is not safe for threads."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops import peer_rows
from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.peer_memories import RankMemories
from common.engine.ops.peer_norm import SumNorm
from common.engine.ops.peer_rows import stream_sum

RANKS, SIZE, EPS = 2, 24, 1e-5
PROGRAMS = 2


def rank_memories(memory: Tensor, host: Tensor, rank: int, polls: int) -> RankMemories:
    """`memory`: [ranks, bytes], which all ranks share; `host`: [2] int32."""
    return RankMemories(torch.tensor([each.data_ptr() for each in memory]), host, rank, polls)


def sum_rows(
    rank: int, memory: Tensor, host: Tensor, calls: list[Tensor], weight: Tensor, found: list[Tensor]
) -> None:
    """Make the calls of one rank. Call i is `calls[i]`, [ranks + 1, rows, SIZE].

    Its results go to `found[i]`, [ranks, 4, rows, SIZE]: the sum, the normed rows, the total, and the rows that the
    codes and scales of the quantised form stand for.
    """
    setattr(peer_rows, "PROGRAMS", PROGRAMS)  # noqa: B010
    ends = rank_memories(memory, host, rank, 1 << 20)
    for call, results in zip(calls, found, strict=True):
        x, residual = call[rank], call[RANKS]
        places = results[rank]
        stream_sum(x, places[0], ends)
        norm = SumNorm.of(x, residual, weight, EPS)
        stream_sum(x, places[1], ends, norm)
        places[2].copy_(norm.total)
        codes, scales = torch.empty_like(x, dtype=FP8), empty_scales(x, SIZE, blocks=False)
        stream_sum(x, codes, ends, norm._replace(scales=scales))
        places[3].copy_(codes.float() * scales)
