"""Decides when the next step is launched: as late as the device allows, so that requests still join it.

A step writes marks while it runs (progress_mark.py). The main loop processes messages until the step has passed the
last mark after which enough work is left for a plan and the launch of the target's forward, and then until just enough
is left. How long these take and how much follows each mark is measured at every step. While that is unknown, and after
short steps, the next step is launched at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from common.node.overlap import Completion
from common.observability.logs import Log
from decode_node.step_result import Launched, StepResult

MARGIN = 0.0001  # seconds added to the measured time of a launch: the loop sees a mark that much later
MAX_MARGIN = 0.005
# Factors of the margin after a launch that came too late, and in time: they balance if one in 20 is late.
RAISED, LOWERED = 1.2, 0.99
MAX_LAUNCH = 0.02
LAUNCHES = 64  # latest ones that are remembered
SLOWER = 12  # one launch in this many may take longer than expected
FOLLOWED = 0.1  # share of a longer time after a mark that one step adds; a shorter time counts at once
PRECISE = 0.0004  # seconds between two reads of the count; times of marks between others are not taken
MAX_MISSING = 3  # steps in a row without their marks, after which steps are launched at once
MARK_SECONDS = 1.0  # seconds; the longest wait for a mark


class MarkCount(Protocol):
    """The count that steps raise; see ProgressMark."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that write, in order."""
        ...

    @property
    def value(self) -> int:
        """The number of marks written so far."""
        ...


@dataclass(slots=True)
class PacingCounters:
    """Totals since the start of the node."""

    steps: int = 0
    late: int = 0  # launches that the device had to wait for
    missing: int = 0  # steps that ended without their marks


@dataclass(slots=True, eq=False)
class PacedCompletion:
    """The completion of a step that also tells when the next step has to be launched."""

    pacing: Pacing
    inner: Completion
    first: int  # count before the first mark of this step
    launched: float
    seen: list[float] = field(default_factory=list)  # when each mark was seen; 0: too late to tell
    read_at: float = 0.0  # when the marks were last read
    interval: float = 0.0  # between the last two reads of the marks
    running: float = 0.0  # when it was last seen to run
    over: float = 0.0  # when it was first seen to have ended; 0: never before the wait for it
    ended: bool = False

    def due(self) -> bool:
        return self.pacing.due(self)

    def ready(self) -> bool:
        return self.inner.ready()

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.inner.wait(None if meanwhile is None else lambda: self._poll_and(meanwhile))
        self.pacing.end(self)

    def _poll_and(self, meanwhile: Callable[[], None]) -> None:
        self.pacing.read_marks(self)
        self.running = self.read_at
        meanwhile()

    def check_end(self, now: float) -> bool:
        """Return whether the step has ended, and note it."""
        ready = self.inner.ready()
        if not ready:
            self.running = now
        elif not self.over:
            self.over = now
        return ready


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A launched step with a completion that is paced."""

    launched: Launched
    completion: PacedCompletion

    def read(self) -> StepResult:
        return self.launched.read()


def _between(before: float, after: float) -> float:
    """Return when something happened between two reads; 0 if they are too far apart to tell."""
    return (before + after) / 2 if after - before <= PRECISE else 0.0


class Pacing:
    """Owned by the main loop. `counters`, `stage` and `left` are public for reports and tests."""

    def __init__(self, mark: MarkCount, log: Log, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mark = mark
        self._marks = len(mark.layers)
        self._log = log
        self._clock = clock
        self._count = mark.value  # after the marks of all steps launched so far
        self._newest: PacedCompletion | None = None
        self._due_at: float | None = None  # when the launch that follows became due
        # Seconds of plans and launches, until the device had the forward. The slowest ones must not count: each would
        # let the steps that follow be launched at once, so that requests which arrive meanwhile miss a step.
        self._launches: deque[float] = deque(maxlen=LAUNCHES)
        self._launch = 0.0  # expected
        self._margin = MARGIN
        self.left: list[float | None] = [None] * self._marks  # seconds from each mark to the end of a step
        self._missing_in_a_row = 0
        self.stage: int | None = None  # index of the mark after which a step is launched; None: at once
        self.counters = PacingCounters()

    def begun(self) -> None:
        """Note that the device has the target's forward of the next step: what else the launch does is not urgent."""
        due, self._due_at = self._due_at, None
        before, now = self._newest, self._clock()
        if due is not None and before is not None and not before.ended:
            self._learn_launch(now - due, before.check_end(now))

    def paced(self, launched: Launched) -> Launched:
        """Return a step that has just been launched with a paced completion."""
        now = self._clock()
        if self._newest is not None and not self._newest.ended:
            self._newest.check_end(now)
        self.counters.steps += 1
        first, self._count = self._count, self._count + self._marks
        self._newest = PacedCompletion(self, launched.completion, first, now)
        return PacedStep(launched, self._newest)

    def unpaced(self) -> None:
        """Note a launched step whose results are read before the next one is planned."""
        self._count += self._marks
        self._newest, self._due_at = None, None

    def due(self, step: PacedCompletion) -> bool:
        """Return whether the step after this one has to be launched now."""
        self.read_marks(step)
        if self._early(step) and step.read_at - step.launched < MARK_SECONDS:
            return False
        self._due_at = step.read_at
        return True

    def _early(self, step: PacedCompletion) -> bool:
        """Return whether more work is left in a step than a plan and a launch take."""
        if self.stage is None or step.inner.ready():
            return False
        if len(step.seen) <= self.stage:
            return True
        seen, left = step.seen[self.stage], self.left[self.stage]
        if not seen or left is None:
            return False  # the mark was seen too late to tell how much of the time after it is over
        # The next read must not come too late.
        return step.read_at - seen + step.interval < left - self._launch - self._margin

    def read_marks(self, step: PacedCompletion) -> None:
        """Note the marks that the step has passed since the last call."""
        now, passed = self._clock(), min(self._mark.value - step.first, self._marks)
        if passed > len(step.seen):
            before = max(step.read_at, step.launched)
            at = _between(before, now)
            step.seen += [0.0] * (passed - len(step.seen) - 1) + [at]
        step.interval, step.read_at = now - step.read_at, now

    def end(self, step: PacedCompletion) -> None:
        """Learn from a step that has ended, and choose the mark for the next."""
        step.ended = True
        value = self._mark.value
        missing = max(step.first + self._marks - value, 0)
        self._synchronize(step, value, missing)
        if missing:
            self._miss()
            return
        self._missing_in_a_row = 0
        now = self._clock()
        self._learn_left(step, _between(step.running, step.over or now), step.over or now)
        wanted = self._launch + self._margin
        stages = [index for index, left in enumerate(self.left) if left is not None and left >= wanted]
        self.stage = stages[-1] if stages else None

    def _synchronize(self, step: PacedCompletion, value: int, missing: int) -> None:
        """Correct the count after missing marks. Forwards that were not steps are noticed when nothing is in flight."""
        newest = self._newest
        if newest is step:
            self._count = value
            return
        # A step that is not paced may be in flight, which has not written its marks yet.
        self._count = max(self._count - missing, value)
        if newest is not None:
            newest.first = self._count - self._marks

    def _learn_launch(self, seconds: float, over: bool) -> None:
        """Learn from a launch that took this many seconds. `over`: the device has ended the step before."""
        self._launches.append(min(seconds, MAX_LAUNCH))
        self._launch = sorted(self._launches)[-1 - len(self._launches) // SLOWER]
        # A step that was followed at once tells nothing, but a margin that leaves no mark has to shrink all the same.
        late = self.stage is not None and over
        self.counters.late += late
        margin = self._margin * (RAISED if late else LOWERED)
        self._margin = min(max(margin, MARGIN), MAX_MARGIN)

    def _learn_left(self, step: PacedCompletion, end: float, latest: float) -> None:
        """Update the time from each mark to the end; for marks that were not seen in time it changes in proportion.

        Args:
            end: of the step; 0: the host was busy then.
            latest: a time at which the step was over.
        """
        seen, change = [*step.seen, *[0.0] * (self._marks - len(step.seen))], 1.0
        for index, (at, before) in enumerate(zip(seen, self.left)):
            if at:
                left = (end or latest) - at
                if not end and (before is None or left > before):
                    continue
                if before is not None and left > before:
                    left = before + FOLLOWED * (left - before)
                change = left / before if before else 1.0
                self.left[index] = left
        for index, (at, before) in enumerate(zip(seen, self.left)):
            if not at and before is not None:
                self.left[index] = before * change

    def _miss(self) -> None:
        """Note a step without its marks. After several of them their times have to be learnt again."""
        self.counters.missing += 1
        self._missing_in_a_row += 1
        self.stage = None
        if self._missing_in_a_row == MAX_MISSING:
            self.left = [None] * self._marks
            self._log.warning(
                "steps write no progress marks: each is launched before the previous one is read"
            )
