"""Runs copies from the device to host memory: at once on a CPU, on a stream of their own on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from common.node.completion import CudaCompletion, Immediate
from common.node.overlap import Completion

Copied = TypeVar("Copied")


class HostLane(Protocol):
    """Starts copies in order, without waiting for them."""

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        """Call `copy`, whose copies begin after all work launched so far. Its result is readable when complete."""
        ...

    def follow(self) -> None:
        """Let all work launched from now on begin after the copies that were started."""
        ...


class Inline:
    """Copies that are done when `copy` returns, as on a CPU."""

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        return copy(), Immediate()

    def follow(self) -> None:
        pass


class CopyStream:
    """Copies on a CUDA stream of their own: steps go on meanwhile. `copy` must copy to pinned memory only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return copy(), CudaCompletion()

    def follow(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def host_lane(device: torch.device) -> HostLane:
    """Return the lane of a node's device."""
    return CopyStream(device) if device.type == "cuda" else Inline()
