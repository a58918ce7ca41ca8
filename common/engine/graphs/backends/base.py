"""The interface of a backend towards GraphRunner, and of a recorder towards a backend.

backend    none | full | breakable | piecewise  what a graph consists of: nothing, one segment, segments and eager
                                             breaks, or the same for a compiled body
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
    """A callable cannot be recorded; the text contains the call and the remedy."""


@dataclass(slots=True)
class Recording(Generic[Output]):
    """One captured graph. `output` is static memory that holds the results of the latest replay."""

    output: Output
    steps: list[Callable[[], None]]  # launches of segments, and breaks, in order
    nbytes: int = 0
    breaks: int = 0

    def replay(self) -> None:
        for step in self.steps:
            step()


@dataclass(frozen=True, slots=True)
class GraphCompilation:
    """The work of torch.compile for the graphs of a backend, done once for all of its shapes."""

    compiler: str
    seconds: float
    pieces: int  # parts between attention calls
    kinds: int  # distinct pieces, each compiled once


class Backend(Protocol):
    """Records a callable that takes no arguments and works on static inputs."""

    @property
    def name(self) -> str: ...
    @property
    def breaks(self) -> bool:
        """True if break points run eagerly in replay, with the live batch."""
        ...

    @property
    def compilation(self) -> GraphCompilation | None:
        """The compilation so far; None for a backend that captures code as it is written."""
        ...

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        """Record `run`. Raises RuntimeError (CaptureError for a known cause); the backend stays usable."""
        ...


class Handle(Protocol):
    """Address of a tensor of a capture. Its memory may still be reused by later segments of the pool."""

    def open(self) -> Tensor:
        """Return a tensor over that memory; called after the capture."""
        ...


class Recorder(Protocol):
    """Records segments of work on static storages."""

    @property
    def name(self) -> str: ...
    @property
    def warm_ups(self) -> int: ...

    def session(self) -> AbstractContextManager[None]:
        """Context around the warm-ups and all segments of one graph."""
        ...

    def begin(self) -> None: ...

    def resume(self, like: Tensor) -> Tensor:
        """Call `begin` after a break and return static memory for the break's result, shaped like `like`."""
        ...

    def end(self) -> Callable[[], None]:
        """Close the segment and return its replay."""
        ...

    def abort(self) -> None:
        """Leave a segment that failed; a no-op between segments."""
        ...

    def handle(self, tensor: Tensor) -> Handle:
        """Return a handle, within the session.

        Tensors without a handle that no later segment reads need not be kept.
        """
        ...

    def memory(self) -> int:
        """Return the bytes that recordings hold, after releasing what warm-ups and breaks have left unused."""
        ...
