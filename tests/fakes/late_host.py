"""Lanes between device and host memory that copy as late as they may, as those of a busy GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.node.host_lane import Stage
from common.node.host_store import Lanes
from common.node.overlap import Completion


@dataclass(slots=True)
class LateStore:
    """A copy to the host that is made when it has been asked about often enough."""

    copy: Callable[[], Any]
    asks: int
    done: bool = False

    def due(self) -> bool:
        return True

    def ready(self) -> bool:
        self.asks -= 1
        if self.asks < 0 and not self.done:
            self.copy()
            self.done = True
        return self.done

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        raise AssertionError("nothing waits for a store")


class LateStores:
    """A lane from the device: whatever reuses pages before their copy has ended changes what is stored."""

    def __init__(self, asks: int) -> None:
        self.asks = asks
        self.copies: list[LateStore] = []

    @property
    def unfinished(self) -> list[LateStore]:
        return [each for each in self.copies if not each.done]

    def start(self, copy: Callable[[], Any]) -> tuple[Any, Completion]:
        made = LateStore(copy, self.asks)
        self.copies.append(made)
        return None, made

    def follow(self) -> None:
        raise AssertionError("nothing follows a store on the device")


@dataclass(slots=True)
class LateStage:
    """A part of a load that is copied when work has to follow it."""

    lane: LateLoads
    index: int
    asks: int

    def ready(self) -> bool:
        """Return whether it has ended: after it was asked about often enough, as if nothing followed it."""
        self.asks -= 1
        if self.asks < 0:
            self.lane.copy_until(self.index)
        return self.asks < 0

    def follow(self) -> None:
        self.lane.copy_until(self.index)
        self.lane.followed.append(self.index)


class LateLoads:
    """A lane to the device: what is read before it follows its stage is not there yet."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, Callable[[], None]]] = []
        self.asks = 3  # after which a stage has ended that nothing follows
        self.followed: list[int] = []  # indices of stages, in the order in which something followed them
        self._count = 0

    def load(self, copies: Iterable[Callable[[], None]]) -> Sequence[Stage]:
        stages: list[Stage] = []
        for copy in copies:
            self.pending.append((self._count, copy))
            stages.append(LateStage(self, self._count, self.asks))
            self._count += 1
        return stages

    def copy_until(self, index: int) -> None:
        """Make the copies of all stages up to this one."""
        while self.pending and self.pending[0][0] <= index:
            self.pending.pop(0)[1]()


def late_lanes(asks: int = 3) -> Lanes:
    return Lanes(LateStores(asks), LateLoads())
