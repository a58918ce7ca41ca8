"""What a backend offers to a GraphRunner, and what a recorder offers to a backend.

backend    none | full | breakable | piecewise  what a graph is made of: nothing, one segment, segments and eager
                                             breaks, the same of a compiled body
recorder   CudaRecorder | TapeRecorder          how one segment is recorded and replayed
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

Output = TypeVar("Output")


class CaptureError(RuntimeError):
    """A callable that cannot be recorded; the text says which call, and the remedy."""


@dataclass(slots=True)
class Recording(Generic[Output]):
    """One captured graph. `output` lies in static memory and holds the results of the latest replay."""

    output: Output
    steps: list[Callable[[], None]]  # launches of segments, and breaks, in order
    nbytes: int = 0
    breaks: int = 0

    def replay(self) -> None:
        for step in self.steps:
            step()


@dataclass(frozen=True, slots=True)
class Compilation:
    """What torch.compile has done for the graphs of a backend, once for all of its shapes."""

    compiler: str
    seconds: float
    pieces: int  # between attention
    kinds: int  # of pieces, each compiled once


class Backend(Protocol):
    """Records a callable that takes no arguments and works on static inputs."""

    @property
    def name(self) -> str: ...
    @property
    def breaks(self) -> bool:
        """Whether break points run eagerly in replay, with the live batch."""
        ...

    @property
    def compilation(self) -> Compilation | None:
        """Up to now; None for a backend that captures code as it is written."""
        ...

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        """Raises RuntimeError (CaptureError where we know the cause); the backend stays usable."""
        ...


class Handle(Protocol):
    """Where a tensor of a capture lies. Does not keep its memory from being reused by later segments of the pool."""

    def open(self) -> Tensor:
        """After the capture: a tensor over that memory."""
        ...


class Recorder(Protocol):
    """Records segments of work on static storages."""

    @property
    def name(self) -> str: ...
    @property
    def warm_ups(self) -> int: ...

    def session(self) -> AbstractContextManager[None]:
        """Around the warm-ups and all segments of one graph."""
        ...

    def begin(self) -> None: ...

    def resume(self, like: Tensor) -> Tensor:
        """`begin` behind a break: static memory for the break's result, shaped as `like`, from this segment on."""
        ...

    def end(self) -> Callable[[], None]:
        """Close the segment; returns its replay."""
        ...

    def abort(self) -> None:
        """Leave a segment that failed; nothing to do between segments."""
        ...

    def handle(self, tensor: Tensor) -> Handle:
        """Within the session. What nobody takes a handle of and no later segment reads need not be kept."""
        ...

    def memory(self) -> int:
        """Bytes that recordings hold by now. What warm-ups and breaks have left unused is given back first."""
        ...
