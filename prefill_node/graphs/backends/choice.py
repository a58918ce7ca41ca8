"""Makes the graph backend of a prefill node from its configured name."""

from __future__ import annotations

import torch

from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.names import BREAKABLE, FULL, NONE, PIECEWISE
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.recorder import recorder_for
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.graphs.backends.piecewise import PiecewiseGraphs


def prompt_backend(name: str, device: torch.device, bodies: CompiledBodies | None = None) -> Backend:
    """Return a backend with a memory pool of its own, for one GraphRunner. Raises ValueError for an unknown name.

    Args:
        bodies: compiled bodies for piecewise graphs; None: compile them here, with `eager`.
    """
    if name == NONE:
        return NoGraphs()
    if name == FULL:
        return FullGraphs(recorder_for(device))
    if name == BREAKABLE:
        return BreakableGraphs(recorder_for(device))
    if name == PIECEWISE:
        return PiecewiseGraphs(recorder_for(device), CompiledBodies() if bodies is None else bodies)
    raise ValueError(
        f"a prefill node has no graph backend {name!r}; write {NONE}, {FULL}, {BREAKABLE} or {PIECEWISE}"
    )
