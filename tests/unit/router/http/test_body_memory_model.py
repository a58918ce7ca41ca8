"""Memory of large bodies while clients upload, wait, leave and stall in any order, against plain lists of both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import Overloaded
from router.http import body_memory
from router.http.body_memory import FAIR_SECONDS, BodyMemory, Reservation
from tests.fakes.stepped_loop import SteppedLoop

MOST, MOST_WAITING, RATE = 100, 6, 10
INDEX = st.integers(0, 63)  # of a body, modulo how many there are


@dataclass(eq=False)
class Body:
    """A body as its sender sees it."""

    client: str
    size: int
    asked: asyncio.Task[Reservation] = None  # type: ignore[assignment]
    revoked: bool = False


class Uploads(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for name, value in (("MAX_RESERVED", MOST), ("MAX_WAITING", MOST_WAITING), ("MIN_RATE", RATE)):
            self.patch.setattr(body_memory, name, value)
        self.loop = SteppedLoop()
        self.memory = BodyMemory(self.loop.time)
        self.held: list[Body] = []
        self.waiting: list[Body] = []  # in the order in which they have asked

    @rule(client=st.sampled_from("abc"), size=st.sampled_from([1, 10, 30, 50, 60, 300]))
    def ask(self, client: str, size: int) -> None:
        body = Body(client, size)
        body.asked = self.loop.create_task(self.memory.reserve(client, size, partial(self.revoke, body)))
        waited = len(self.waiting)
        self.waiting.append(body)
        self.settle()
        if body.asked.done() and isinstance(body.asked.exception(), Overloaded):
            assert waited == MOST_WAITING
            self.waiting.remove(body)

    def revoke(self, body: Body) -> None:
        assert {each.client for each in self.waiting} - {body.client}, "an upload was ended for nobody else"
        body.revoked = True

    @rule(index=INDEX, complete=st.booleans(), count=st.integers(0, 40))
    def receive(self, index: int, complete: bool, count: int) -> None:
        if self.held:
            held = self.held[index % len(self.held)].asked.result()
            held.received = min(held.received + count, held.size)
            held.revocable = held.revocable and not complete

    @rule(index=INDEX)
    def release(self, index: int) -> None:
        if self.held:
            self.memory.release(self.held.pop(index % len(self.held)).asked.result())
            self.settle()

    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        if self.waiting:
            self.waiting.pop(index % len(self.waiting)).asked.cancel()
            self.settle()

    @rule(index=INDEX)
    def one_leaves_as_another_ends(self, index: int) -> None:
        """The one that leaves may just have got the memory."""
        if self.held and self.waiting:
            self.memory.release(self.held.pop(index % len(self.held)).asked.result())
            self.waiting.pop(index % len(self.waiting)).asked.cancel()
            self.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0, FAIR_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run_for(seconds)
        self.settle()

    def settle(self) -> None:
        """Let everybody act who can; uploads that have to end do so."""
        self.loop.run_for()
        while ended := [body for body in self.held if body.revoked]:
            for body in ended:
                self.held.remove(body)
                self.memory.release(body.asked.result())
            self.loop.run_for()
        for body in [each for each in self.waiting if each.asked.done() and not each.asked.exception()]:
            self.waiting.remove(body)
            self.held.append(body)

    @invariant()
    def bounds_hold_and_nobody_waits_without_need(self) -> None:
        if not hasattr(self, "memory"):
            return
        sizes = [body.size for body in self.held]
        assert self.memory.reserved == sum(sizes)
        assert sum(sizes) <= MOST or len(sizes) == 1
        for client in "abc":
            own = [body.size for body in self.held if body.client == client]
            assert sum(own) <= MOST // 2 or len(own) == 1
        # Who waits for bodies of the same client holds up nobody else.
        first = next((body for body in self.waiting if self.may_have(body)), None)
        assert first is None or (sizes and sum(sizes) + first.size > MOST)

    def may_have(self, body: Body) -> bool:
        own = [each.size for each in self.held if each.client == body.client]
        return not own or sum(own) + body.size <= MOST // 2

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.held or self.waiting:
            assert self.held, "bodies wait for nothing"
            self.release(0)
        self.loop.run_for(1.0)
        assert self.memory.reserved == 0
        assert not self.loop.timers()
        assert not self.loop.problems
        self.loop.close()
        self.patch.undo()


Uploads.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestUploads = Uploads.TestCase
