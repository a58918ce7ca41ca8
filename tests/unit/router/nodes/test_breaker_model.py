"""A breaker while requests begin, fail, succeed and end in any order: it lets one trial through at a time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.nodes.breaker import BreakerLimits, Breakers
from tests.fakes.clock import Clock

TRIAL = 5.0  # seconds
NODE = "a"
INDEX = st.integers(0, 63)  # of a request, modulo how many there are


class Requests(RuleBasedStateMachine):
    @initialize(failures=st.sampled_from([1, 1, 2]), before=st.integers(2, 4))
    def start(self, failures: int, before: int) -> None:
        """`before`: requests that are placed before any failure."""
        self.clock = Clock()
        limits = BreakerLimits(failures, window=10.0, first_pause=1.0, longest_pause=4.0, trial=TRIAL)
        self.breakers: Breakers[str] = Breakers(limits, self.clock)
        self.running: list[int] = []  # rooms
        self.rooms = 0
        self.trial: tuple[int, float] | None = None  # room and start of the latest trial
        for _ in range(before):
            self.place(forced=False)

    @rule(forced=st.sampled_from([False] * 4 + [True]))
    def place(self, forced: bool) -> None:
        """`forced`: there is no other node, so that one with a breaker gets the request, too."""
        if NODE in self.breakers.blocked() and not forced:
            return
        self.rooms += 1
        self.running.append(self.rooms)
        if self.breakers.state(NODE) != "closed":
            self.trial = self.rooms, self.clock.now
        self.breakers.placed(NODE, self.rooms)

    @rule(index=INDEX, verdict=st.sampled_from(["failed", "failed", "succeeded", "none", "none"]))
    def end(self, index: int, verdict: str) -> None:
        if not self.running:
            return
        room = self.running.pop(index % len(self.running))
        before = self.breakers.state(NODE)
        if verdict == "failed":
            self.breakers.failed(NODE)
            # It opens again, and the next trial is another one.
            self.trial = None if before == "half-open" else self.trial
        elif verdict == "succeeded":
            self.breakers.succeeded(NODE)
            self.trial = None if before == "half-open" else self.trial
        self.breakers.released(NODE, room)

    @rule(seconds=st.sampled_from([0.3, 1.0, 1.0, 4.0, TRIAL]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def no_request_joins_a_trial(self) -> None:
        if not hasattr(self, "breakers"):
            return
        state, blocked = self.breakers.state(NODE), NODE in self.breakers.blocked()
        assert blocked or state != "open"
        assert not blocked or state != "closed"
        if state == "half-open":
            room, since = self.trial or (0, 0.0)
            assert blocked == (room in self.running and self.clock.now < since + TRIAL)


Requests.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase
