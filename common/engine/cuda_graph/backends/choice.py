"""Which backend a name of the config means on a device: CUDA graphs on a GPU, the tape on the CPU."""

from __future__ import annotations

import torch

from common.engine.cuda_graph.backends.base import Backend, Recorder
from common.engine.cuda_graph.backends.breakable import BreakableGraphs
from common.engine.cuda_graph.backends.cuda import CudaRecorder
from common.engine.cuda_graph.backends.full import FullGraphs
from common.engine.cuda_graph.backends.none import NoGraphs
from common.engine.cuda_graph.backends.tape import TapeRecorder

NONE, FULL, BREAKABLE = "none", "full", "breakable"
RECORDING_DEVICES = ("cuda", "cpu")


def make_backend(name: str, device: torch.device) -> Backend:
    """A backend with a memory pool of its own: one for each GraphRunner. Raises ValueError for an unknown name."""
    if name == NONE:
        return NoGraphs()
    if name == FULL:
        return FullGraphs(_recorder(device))
    if name == BREAKABLE:
        return BreakableGraphs(_recorder(device))
    raise ValueError(f"{name!r} is not a graph backend; write {NONE}, {FULL} or {BREAKABLE}")


def _recorder(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else TapeRecorder()
