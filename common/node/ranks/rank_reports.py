"""The ranks of a node report what each of them holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from common.messages.identity import RankReport
from common.node.serving_model import ServingModel


def rank_reports(
    served: ServingModel, device: str, exchange: Callable[[bytes], Sequence[bytes]]
) -> tuple[RankReport, ...]:
    """Return the reports of all ranks, in their order; every rank calls it once its graphs are captured.

    Args:
        device: this rank's, as in the cluster file.
        exchange: gives this rank's bytes to the others and returns those of all ranks.
    """
    own = RankReport(
        device=device,
        pages=served.num_pages - 1,
        pool_bytes=served.layout.total_bytes,
        memory_bytes=taken_bytes(served.placement.device),
    )
    return tuple(
        msgspec.msgpack.decode(each, type=RankReport) for each in exchange(msgspec.msgpack.encode(own))
    )


def taken_bytes(device: torch.device) -> int:
    """Return the bytes of the device that this process has taken; on a CPU, its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")
