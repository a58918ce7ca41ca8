"""The one loop of both nodes: launch step t+1 before the results of step t are read.

    prepare  drain messages, schedule; returns what to run, or None
    launch   start it on the device; returns a Launched (results not readable yet, perhaps)
    finish   read the results of one launch: tokens out, requests ended
    idle     nothing to launch and nothing in flight: wait for a message, with a deadline

On a device that runs beside the host at most one launch is unread while the next is started. Where results are ready
at once (CPU) they are read at once: waiting one step would only delay them.

Before a launch and before a wait for results the loop announces how long that may take (announced_work.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.node.announced_work import Announcer, Unannounced


class Completion(Protocol):
    """When the results of a launch may be read."""

    def ready(self) -> bool: ...

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Until the results may be read. `meanwhile` is called again and again as long as that takes."""
        ...


class HasCompletion(Protocol):
    @property
    def completion(self) -> Completion: ...


Plan = TypeVar("Plan")
Launched = TypeVar("Launched", bound=HasCompletion)


class OverlapLoop(Generic[Plan, Launched]):
    """Runs until `stop` returns True, then finishes what is in flight."""

    def __init__(
        self,
        prepare: Callable[[], Plan | None],
        launch: Callable[[Plan], Launched],
        finish: Callable[[Launched], None],
        idle: Callable[[], None],
        stop: Callable[[], bool],
        meanwhile: Callable[[], None] | None = None,
        announcer: Announcer[Plan] | None = None,
    ) -> None:
        """`meanwhile` is called while the loop waits for the device: what cannot wait for the end of a forward."""
        self._prepare = prepare
        self._launch = launch
        self._finish = finish
        self._idle = idle
        self._stop = stop
        self._meanwhile = meanwhile
        self._announcer: Announcer[Plan] = announcer or Unannounced()
        self._in_flight: deque[Launched] = deque()

    def run(self) -> None:
        while not self._stop():
            self.turn()
        while (
            self._in_flight
        ):  # nothing new: where results are read one step behind, work would never run out
            self._finish_oldest()

    def turn(self) -> None:
        """One round; tests drive it step by step."""
        plan = self._prepare()
        if plan is not None:
            self._announcer.begin(plan)
            self._in_flight.append(self._launch(plan))
        keep = 1 if plan is not None else 0
        finished = False
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0].completion.ready()):
            self._finish_oldest()
            finished = True
        if plan is None and not finished:
            self._idle()

    def _finish_oldest(self) -> None:
        self._announcer.wait()
        launched = self._in_flight.popleft()
        launched.completion.wait(self._meanwhile)
        self._finish(launched)
        self._announcer.end()
