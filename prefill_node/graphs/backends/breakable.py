"""Segments with eager breaks between them: attention is a break, so one token bucket fits any mix of requests.

At a break point of the capture the segment ends, the function runs once eagerly, its arguments are recorded by
address (later segments may reuse their memory, in the same order in replay as in capture), its result gets static
memory of the next segment, and the next segment begins. Replay launches the segments and calls the functions in
between. A callable without break points becomes one full graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.engine.graphs.backends.base import CaptureError, Handle, Output, Recorder, Recording
from common.engine.graphs.outputs import map_tensors
from prefill_node.graphs.backends.break_point import breaking


class BreakableGraphs:
    """Named `breakable-cuda` over CUDA graphs, `breakable-tape` over the CPU tape."""

    breaks = True
    compilation = None

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def name(self) -> str:
        return f"breakable-{self._recorder.name}"

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        cuts = _Cuts(self._recorder)
        with self._recorder.session():
            for _ in range(self._recorder.warm_ups):
                run()
            before = self._recorder.memory()
            self._recorder.begin()
            try:
                with breaking(cuts):
                    output = run()
                cuts.end_segment()
            except BaseException:
                self._recorder.abort()
                raise
            weak = map_tensors(output, lambda tensor: self._recorder.handle(tensor).open())
        steps = [step.sealed() if isinstance(step, _Break) else step for step in cuts.steps]
        breaks = sum(isinstance(step, _Break) for step in cuts.steps)
        return Recording(weak, steps, self._recorder.memory() - before, breaks)


@dataclass(slots=True)
class _Break:
    """One eager call of a replay."""

    function: Callable[..., Tensor | None]
    args: tuple[Any, ...]  # tensors as _Taken
    kwargs: dict[str, Any]
    out: Handle | None

    def sealed(self) -> Callable[[], None]:
        """Return the call over the addresses of the capture; called after the capture."""
        args = tuple(_opened(arg) for arg in self.args)
        kwargs = {name: _opened(arg) for name, arg in self.kwargs.items()}
        function = self.function
        if self.out is None:
            return lambda: _discard(function(*args, **kwargs))
        out = self.out.open()
        if "out" in inspect.signature(function).parameters:
            kwargs["out"] = out

        def call() -> None:
            result = function(*args, **kwargs)
            if result is None or result.shape != out.shape:
                found = None if result is None else tuple(result.shape)
                raise CaptureError(
                    f"{_name(function)} returned {found} in replay and {tuple(out.shape)} in capture"
                )
            if result is not out:
                out.copy_(result)

        return call


class _Cuts:
    """Receives the break points of one capture. Implements `BreakHandler`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.steps: list[Callable[[], None] | _Break] = []
        self._inside: Callable[..., Tensor | None] | None = None

    def end_segment(self) -> None:
        self.steps.append(self._recorder.end())

    def next_segment(self) -> None:
        self.end_segment()
        self._recorder.begin()

    def take_break(
        self, function: Callable[..., Tensor | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        if self._inside is not None:
            raise CaptureError(
                f"break point {_name(function)} inside break point {_name(self._inside)}: code in a break runs "
                "eagerly already, so remove the inner decorator"
            )
        self.end_segment()
        self._inside = function
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside = None
        handles = tuple(self._handle(arg) for arg in args)
        named = {name: self._handle(arg) for name, arg in kwargs.items()}
        if result is None:
            self.steps.append(_Break(function, handles, named, None))
            self._recorder.begin()
            return None
        bridge = self._recorder.resume(result)
        self.steps.append(_Break(function, handles, named, self._recorder.handle(bridge)))
        return bridge

    def _handle(self, arg: Any) -> Any:
        return _Taken(self._recorder.handle(arg)) if isinstance(arg, Tensor) else arg


@dataclass(frozen=True, slots=True)
class _Taken:
    """Placeholder of a tensor argument until the capture is over."""

    handle: Handle


def _opened(arg: Any) -> Any:
    return arg.handle.open() if isinstance(arg, _Taken) else arg


def _discard(_result: Tensor | None) -> None:
    return None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
