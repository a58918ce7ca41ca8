"""The plans that a rank has launched and that are not complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from common.node.overlap import Completion

# As on rank 0, whose loop reads the results of one plan before it launches the next but one.
MAX_LAUNCHED = 2


class LaunchedPlans:
    """Tracks the completion of plans in order."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` is called once a plan is complete; it raises RankFailed if a collective has failed."""
        self._check = check
        self._plans: deque[tuple[int, Completion]] = deque()  # (generation, completion), the oldest first
        self.completed = 0  # generation of the newest complete plan

    def add(self, generation: int, completion: Completion) -> None:
        """Add a launched plan; wait for the oldest one if too many are in flight."""
        self._plans.append((generation, completion))
        if len(self._plans) > MAX_LAUNCHED:
            self._plans[0][1].wait()
            self._end_oldest()

    def poll(self) -> bool:
        """Note which plans are complete by now. Return whether some are not."""
        while self._plans and self._plans[0][1].ready():
            self._end_oldest()
        return bool(self._plans)

    def _end_oldest(self) -> None:
        generation, _ = self._plans.popleft()
        self._check()
        self.completed = generation
