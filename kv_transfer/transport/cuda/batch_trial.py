"""Tries the runtime's call for many copies at the start of a node, which then uses it only if all bytes arrive."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

import numpy as np
import torch

from common.observability.logs import Log
from kv_transfer.transport.cuda.batch_copy import Addresses
from kv_transfer.transport.cuda.cudart import Lane, Mark

# Bytes of three pieces: of less than a word, of a page, and of more.
_SIZES: Final = np.array([5, 4096, 70_000], dtype=np.int64)
_SOURCES: Final = np.array([3, 80_000, 8192], dtype=np.int64)
_ON_DEVICE: Final = np.array([90_000, 16, 4608], dtype=np.int64)
_TARGETS: Final = np.array([80_007, 74_000, 64], dtype=np.int64)
_BYTES: Final = 1 << 17


class Batches(Protocol):
    """The part of `CudaRuntime` that is tried."""

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, device: int, stream: int
    ) -> bool: ...
    def use_single_copies(self) -> None: ...
    def lane(self, device: int) -> Lane: ...
    def now(self, device: int) -> Mark: ...


def try_batches(cuda: Batches, device: torch.device, log: Log) -> None:
    """Copy some bytes to the device and back. If that fails, log why, and let all later copies be single ones."""
    try:
        problem = _problem(cuda, device)
    except RuntimeError as error:  # also CudaError, and what torch raises
        problem = str(error)
    if problem:
        cuda.use_single_copies()
        log.warning("copies to and from host memory are single calls, which take longer", reason=problem)


def _problem(cuda: Batches, device: torch.device) -> str:
    """Return what is wrong with batches of copies; empty if they work, or are not used anyway."""
    pinned, index = device.type == "cuda", device.index or 0
    given = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=pinned)
    given.copy_(torch.arange(_BYTES) * 167 % 251)
    back = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=pinned)
    between = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    lane = cuda.lane(index)
    lane.wait_for(cuda.now(index))
    source, middle, target = (
        each.data_ptr() + at for each, at in ((given, _SOURCES), (between, _ON_DEVICE), (back, _TARGETS))
    )
    try:
        forth = cuda.copy_batch(middle, source, _SIZES, index, lane.handle)
        back_again = forth and cuda.copy_batch(target, middle, _SIZES, index, lane.handle)
        lane.mark().wait()
    except RuntimeError:
        # What has started must not write to memory that is freed here.
        with suppress(RuntimeError):
            lane.mark().wait()
        raise
    if not back_again:
        return "only copies to the device were possible" if forth else ""
    expected = torch.zeros_like(back)
    for size, at, to in zip(_SIZES.tolist(), _SOURCES.tolist(), _TARGETS.tolist(), strict=True):
        expected[to : to + size] = given[at : at + size]
    return "" if torch.equal(back, expected) else "a batch of copies brought other bytes than were sent"
