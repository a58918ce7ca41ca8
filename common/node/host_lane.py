"""Runs copies between device and host memory: at once on a CPU, on a stream of their own on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from common.node.completion import CudaCompletion, Immediate
from common.node.overlap import Completion

Copied = TypeVar("Copied")


class Stage(Protocol):
    """A part of what a lane copies."""

    def follow(self) -> None:
        """Let all work launched from now on begin after this part, and those before it."""
        ...

    def ready(self) -> bool:
        """Return at once whether this part has ended."""
        ...


class HostLane(Protocol):
    """Starts copies in order, without waiting for them."""

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        """Call `copy`, whose copies begin after all work launched so far. Its result is readable when complete."""
        ...

    def follow(self) -> None:
        """Let all work launched from now on begin after the copies that were started."""
        ...


class LoadLane(Protocol):
    """Starts copies to memory of the device that no launched work uses."""

    def load(self, copies: Iterable[Callable[[], None]]) -> Sequence[Stage]:
        """Start all copies in this order, at once, even while earlier work runs; each is a stage."""
        ...


class Done:
    """A stage whose copies have ended."""

    def follow(self) -> None:
        pass

    def ready(self) -> bool:
        return True


class Inline:
    """Copies that are done when `copy` returns, as on a CPU."""

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        return copy(), Immediate()

    def follow(self) -> None:
        pass

    def load(self, copies: Iterable[Callable[[], None]]) -> Sequence[Stage]:
        stages = []
        for copy in copies:
            copy()
            stages.append(Done())
        return stages


class StreamStage:
    """Everything on the current stream at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def follow(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CopyStream:
    """Copies on a CUDA stream of their own: steps go on meanwhile, if `copy` copies to pinned memory only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, copy: Callable[[], Copied]) -> tuple[Copied, Completion]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return copy(), CudaCompletion()

    def follow(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def load(self, copies: Iterable[Callable[[], None]]) -> Sequence[Stage]:
        stages: list[Stage] = []
        with torch.cuda.stream(self._stream):
            for copy in copies:
                copy()
                stages.append(StreamStage(self._device))
        return stages


def host_lane(device: torch.device) -> CopyStream | Inline:
    """Return the lane of a node's device."""
    return CopyStream(device) if device.type == "cuda" else Inline()
