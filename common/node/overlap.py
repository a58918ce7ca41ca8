"""The main loop of both nodes: launches step t+1 before the results of step t are read.

    hold     process messages until the next launch is due (`Completion.due`)
    prepare  drain messages, schedule; returns the work to run, or None
    launch   start it on the device; returns a Launched, whose results may not be readable yet
    finish   read the results of one launch: emit tokens, end requests
    after    what nobody waits for: reports of the turn
    idle     nothing to launch and nothing in flight: wait for a message, with a deadline

On a device that runs asynchronously, at most one launch is unread while the next is started. Results that are ready
at once (CPU) are read at once: waiting one step would only delay them.

Before a launch, and before a wait for results that are not ready, the loop announces how long that may take
(announced_work.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.node.announced_work import Announcer, Unannounced


class Completion(Protocol):
    """Tells when the results of a launch may be read."""

    def ready(self) -> bool: ...

    def due(self) -> bool:
        """Return whether the next launch has to begin, so that the device does not run out of work.

        It may come as late as that, but at least as early as `ready`.
        """
        ...

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until the results may be read. `meanwhile` is called repeatedly until then.

        The loop calls this once for every launch, even if it is ready: pacing learns from it when steps end.
        """
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
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`meanwhile` is called while the loop waits for the device or until a launch is due, for work that cannot
        wait for the end of a forward. Without it launches are due at once. `after` is called once per turn.
        """
        self._prepare = prepare
        self._launch = launch
        self._finish = finish
        self._idle = idle
        self._stop = stop
        self._meanwhile = meanwhile
        self._announcer: Announcer[Plan] = announcer or Unannounced()
        self._after = after
        self._in_flight: deque[Launched] = deque()

    def run(self) -> None:
        while not self._stop():
            self.turn()
        # Only finish: with results read one step late, new work would never end.
        while self._in_flight:
            self._finish_oldest()

    def turn(self) -> None:
        """Run one round; tests drive it step by step."""
        self._hold()
        plan = self._prepare()
        if plan is not None:
            self._announcer.begin(plan)
            self._in_flight.append(self._launch(plan))
        keep = 1 if plan is not None else 0
        finished = False
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0].completion.ready()):
            self._finish_oldest()
            finished = True
        self._after()
        if plan is None and not finished:
            self._idle()

    def _hold(self) -> None:
        if self._meanwhile is None or not self._in_flight:
            return
        self._announcer.wait()
        while not (self._in_flight[-1].completion.due() or self._stop()):
            self._meanwhile()

    def _finish_oldest(self) -> None:
        launched = self._in_flight.popleft()
        if not launched.completion.ready():
            self._announcer.wait()
        launched.completion.wait(self._meanwhile)
        self._finish(launched)
        self._announcer.end()
