"""Counts the programs of attention that have ended, so that the last one of a tile knows that it is the last."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import launches

MAX_TILES = 1 << 16  # counts: of tiles, and of parts of prompts


def ended_programs(device: torch.device) -> Tensor:
    """Return the counts that all calls on a device share, [MAX_TILES] int32, which are zero between calls.

    Calls on two streams at once would count each other's programs. There are none: a process has at most one
    node, whose forwards, warm-ups and graphs run one after another.

    Where launches only compile, a call gets memory that nothing uses.

    `PagedAttention` makes them when it is constructed. Raises RuntimeError if a graph is being captured at the first
    call, because that graph would own the memory.
    """
    if not launches():
        return torch.empty(MAX_TILES, dtype=torch.int32, device=device)
    return _counts(device)


@functools.cache
def _counts(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the counts of attention must be made before the first graph is captured, which would own them"
        )
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
