"""The two parts that run in the process of a rank: its work, which applies plans, and a service for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import zmq


class RankWork(Protocol):
    """Applies the plans of rank 0."""

    @property
    def completed(self) -> int:
        """The generation of the newest plan that is complete on this rank's device."""
        ...

    def apply(self, frame: bytes, /) -> None:
        """Apply a frame of the ring of plans."""
        ...

    def turn(self) -> bool:
        """Look what has completed. Return True while something is in flight whose end nothing else announces."""
        ...


class RankService(Protocol):
    """Runs on the thread of the rank, between plans."""

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """The sockets whose messages end a wait."""
        ...

    def turn(self, completed: int, /) -> bool:
        """Process what has arrived, without waiting. Return True to be called again soon.

        `completed` is the generation of the newest plan that is complete on this rank's device.
        """
        ...

    def close(self) -> None: ...
