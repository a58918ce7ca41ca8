"""Segments and eager breaks as in `breakable`, for a body that torch.compile has split at attention.

Each segment is a compiled piece and the write of its keys and values; attention is the break between two segments.
Capture, arguments and results across breaks, memory and replay are those of `breakable`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.engine.graphs.backends.base import GraphCompilation, Output, Recorder, Recording
from prefill_node.graphs.backends.body_point import compiling
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies


class PiecewiseGraphs:
    """Named `piecewise-eager-cuda` and so on over CUDA graphs, `piecewise-eager-tape` over the CPU tape."""

    breaks = True

    def __init__(self, recorder: Recorder, bodies: CompiledBodies) -> None:
        self._recorder = recorder
        self._bodies = bodies
        self._graphs = BreakableGraphs(recorder)
        self._compiled = False

    @property
    def name(self) -> str:
        return f"piecewise-{self._bodies.compilation.compiler}-{self._recorder.name}"

    @property
    def compilation(self) -> GraphCompilation:
        return self._bodies.compilation

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        with compiling(self._bodies):
            if not self._compiled:
                run()  # compiles, which is impossible inside a capture
                self._compiled = True
                torch.cuda.empty_cache()  # memory of this run, which no capture uses, would count as the graphs'
            return self._graphs.capture(run)
