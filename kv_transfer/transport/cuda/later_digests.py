"""Checksums that a device is still computing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from kv_transfer.transport.page_digest import as_digests


class LaterDigests(Sequence[int]):
    """Checksums that are being copied to host memory; readable once their lane has reached the copy."""

    @abstractmethod
    def values(self) -> list[int]:
        """Return all of them."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.values()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values())


class LandingDigests(LaterDigests):
    """Checksums in a separate host tensor."""

    def __init__(self, sums: Tensor) -> None:
        """`sums`: [n] int64, see `to_host`."""
        self._sums = sums

    def __len__(self) -> int:
        return self._sums.numel()

    def values(self) -> list[int]:
        return as_digests(self._sums.tolist())


def to_host(sums: Tensor) -> Tensor:
    """Return [n] int64 in pinned memory, valid once the current stream has reached this point."""
    if not sums.is_cuda:
        return sums
    landing = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
    return landing.copy_(sums, non_blocking=True)
