"""Maps a backend name of the config to a backend: CUDA graphs on a GPU, the tape on the CPU."""

from __future__ import annotations

import torch

from common.engine.graphs.backends.base import Backend, Recorder
from common.engine.graphs.backends.breakable import BreakableGraphs
from common.engine.graphs.backends.cuda import CudaRecorder
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.piecewise import PiecewiseGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.compiled_body import CompiledBodies

NONE, FULL, BREAKABLE, PIECEWISE = "none", "full", "breakable", "piecewise"


def make_backend(name: str, device: torch.device, bodies: CompiledBodies | None = None) -> Backend:
    """Return a backend with its own memory pool: one per GraphRunner. Raises ValueError for an unknown name.

    Args:
        bodies: the compiled bodies of piecewise graphs; None: compile new ones with `eager`.
    """
    if name == NONE:
        return NoGraphs()
    if name == FULL:
        return FullGraphs(_recorder(device))
    if name == BREAKABLE:
        return BreakableGraphs(_recorder(device))
    if name == PIECEWISE:
        return PiecewiseGraphs(_recorder(device), CompiledBodies() if bodies is None else bodies)
    raise ValueError(f"{name!r} is not a graph backend; write {NONE}, {FULL}, {BREAKABLE} or {PIECEWISE}")


def _recorder(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else TapeRecorder()
