"""Captures the whole callable, including attention and sampling, as one segment. Break points are plain calls."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.graphs.backends.base import Output, Recorder, Recording
from common.engine.graphs.outputs import map_tensors


class FullGraphs:
    """The `full` backend over CUDA graphs, or the `tape` backend on the CPU."""

    breaks = False
    compilation = None

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def name(self) -> str:
        return self._recorder.name

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        with self._recorder.session():
            for _ in range(self._recorder.warm_ups):
                run()
            before = self._recorder.memory()
            self._recorder.begin()
            try:
                output = run()
                segment = self._recorder.end()
            except BaseException:
                self._recorder.abort()
                raise
            weak = map_tensors(output, lambda tensor: self._recorder.handle(tensor).open())
        return Recording(weak, [segment], self._recorder.memory() - before)
