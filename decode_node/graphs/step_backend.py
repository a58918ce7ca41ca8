"""Makes the graph backend of a decode node from its configured name."""

from __future__ import annotations

import torch

from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.names import FULL, NONE
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.recorder import recorder_for


def step_backend(name: str, device: torch.device) -> Backend:
    """Return a backend with a memory pool of its own, for one GraphRunner. Raises ValueError for an unknown name."""
    if name == NONE:
        return NoGraphs()
    if name == FULL:
        return FullGraphs(recorder_for(device))
    raise ValueError(f"a decode node has no graph backend {name!r}; write {NONE} or {FULL}")
