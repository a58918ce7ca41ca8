"""The planner's loop: observe, decide, change, one thing at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from common.errors import ConfigError, NoAnswer
from common.messages.identity import Role
from common.observability.logs import Log
from deploy.cluster_sample import ClusterSample
from deploy.planning.changers import Changer
from deploy.planning.decision import (
    MAX_CAUTION,
    Decision,
    Limits,
    Move,
    Observation,
    Scale,
    State,
    after_change,
    decide,
    direction_of,
    remember,
)
from deploy.planning.observing import Observer
from deploy.planning.routers import NO_ANSWER


class Planner:
    """Holds the window of observations and the state of decisions."""

    def __init__(self, limits: Limits, observer: Observer) -> None:
        self._limits = limits
        self._observer = observer
        self._window: deque[Observation] = deque(maxlen=limits.window * MAX_CAUTION)
        self._state = State()

    def take(self, samples: Mapping[str, ClusterSample], replicas: Mapping[Role, int]) -> Decision:
        """Take a reading of the routers; return what to change now."""
        seen = self._observer.observe(samples, replicas)
        if seen is None:
            return Decision(None, "this is the first reading")
        return self.add(seen)

    def add(self, seen: Observation) -> Decision:
        self._window.append(seen)
        self._state = remember(self._state, seen)
        return decide(self._window, self._state, self._limits)

    def changed(self, change: Move | Scale, now: float) -> None:
        """Note that a change has been made."""
        direction = direction_of(change, self._window[-1])
        self._state = after_change(self._state, direction, now, self._limits)
        self._window.clear()

    def failed(self, now: float) -> None:
        """Note that an attempt has ended, which changed nothing."""
        self._state = replace(self._state, changed_at=now)
        self._window.clear()

    def unknown(self) -> None:
        """Note that nothing could be read: what was seen before does not count any longer."""
        self._window.clear()


class Readings(Protocol):
    """The routers, as the loop uses them."""

    async def read(self) -> Mapping[str, ClusterSample]:
        """Return a reading of each router that answers. Raises one of NO_ANSWER, ConfigError or ValueError."""
        ...


class PlannerLoop:
    """Runs a planner against routers."""

    def __init__(
        self, planner: Planner, routers: Readings, changer: Changer, interval: float, dry_run: bool, log: Log
    ) -> None:
        """`dry_run`: log decisions only."""
        self._planner = planner
        self._routers = routers
        self._changer = changer
        self._interval = interval
        self._dry_run = dry_run
        self._log = log
        self._said = ""

    async def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Run until cancelled, or until `stopped` after a turn. Raises ConfigError at the start only."""
        checked = False
        while True:
            due = time.monotonic() + self._interval
            try:
                samples = await self._routers.read()
                info = next(iter(samples.values())).info
                if checked or info["ready"]:
                    if not checked:
                        await self._changer.check(info)
                        checked = True
                    await self._turn(samples)
                else:
                    self._say("waiting: the router is not ready")
            except (*NO_ANSWER, NoAnswer, ConfigError, ValueError) as error:
                if isinstance(error, ConfigError) and not checked:
                    raise
                # Tokens and keys are replaced while it runs.
                self._planner.unknown()
                self._say(f"waiting: {error or type(error).__name__}")
            if stopped():
                return
            await asyncio.sleep(max(due - time.monotonic(), 0.0))

    async def _turn(self, samples: Mapping[str, ClusterSample]) -> None:
        decision = self._planner.take(samples, await self._changer.replicas())
        change = decision.change
        if change is None:
            self._say(decision.reason)
            return
        self._said = ""
        fields: dict[str, Any] = {"kind": type(change).__name__.lower(), **asdict(change)}
        if self._dry_run:
            self._log.info("would change", **fields, reason=decision.reason)
        else:
            self._log.info("changing", **fields, reason=decision.reason)
            try:
                answer = await self._changer.apply(change)
            except (*NO_ANSWER, NoAnswer, ConfigError) as error:
                self._log.warning("not changed", **fields, reason=str(error) or type(error).__name__)
                self._planner.failed(time.monotonic())
                return
            self._log.info("changed", **fields, answer=answer)
        self._planner.changed(change, time.monotonic())

    def _say(self, reason: str) -> None:
        """Log why nothing is changed, once."""
        if reason != self._said:
            self._said = reason
            self._log.info("no change", reason=reason)
