"""Completions of a launch: on a CPU, on a CPU that imitates a GPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.node.overlap import Completion


class Immediate:
    """Work that is done when the call returns, as on a CPU."""

    def ready(self) -> bool:
        return True

    def due(self) -> bool:
        return True

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        pass


class Deferred(Immediate):
    """Work that is done but reported as unfinished until the next launch: gives a CPU the event order of a GPU."""

    def ready(self) -> bool:
        return False


class CudaCompletion:
    """An event recorded on the current stream at construction."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def due(self) -> bool:
        return True  # as early as possible; decode_node/pacing.py launches later

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile is None:
            self._event.synchronize()
            return
        while not self._event.query():  # type: ignore[no-untyped-call]
            meanwhile()


def completion_for(device: torch.device, one_behind: bool) -> Callable[[], Completion]:
    """Return the factory that a node passes to its step, chosen once in build. `one_behind` affects only the CPU."""
    if device.type == "cuda":
        return CudaCompletion
    return Deferred if one_behind else Immediate
