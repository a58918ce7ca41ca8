"""Slots of TLS handshakes while connections come, compute, stay silent and leave in any order, against a plain list."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.server import handshakes as module
from router.server.handshakes import SLOT_SECONDS, TlsHandshakes
from tests.fakes.stepped_loop import SteppedLoop

MOST_COMPUTING, MOST_PENDING = 2, 6
INDEX = st.integers(0, 63)  # of a connection, modulo how many there are


@dataclass(eq=False)
class Opening:
    """A connection before the end of its handshake. Its hello has arrived."""

    client: str
    over: asyncio.Event
    task: asyncio.Task[None] = None  # type: ignore[assignment]
    since: float | None = None  # when it got its slot


class Handshakes(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "SLOTS", MOST_COMPUTING)
        self.patch.setattr(module, "MAX_PENDING", MOST_PENDING)
        self.patch.setattr(module, "client_hello", mock.AsyncMock())
        self.loop = SteppedLoop()
        self.handshakes = TlsHandshakes()
        self.open: list[Opening] = []  # in the order in which they came

    def of(self, computing: bool) -> list[Opening]:
        return [each for each in self.open if (each.since is not None) == computing]

    async def compute(self, opening: Opening) -> None:
        connection = mock.Mock(spec=socket.socket)
        async with self.handshakes.turn(connection, opening.client):
            opening.since = self.loop.time()
            await opening.over.wait()

    @rule(clients=st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    def come(self, clients: list[str]) -> None:
        """Some connections arrive in one turn of the loop; each one too many ends the oldest."""
        for client in clients:
            opening = Opening(client, asyncio.Event())
            opening.task = self.loop.create_task(self.compute(opening))
            self.open.append(opening)
        self.loop.run_for()
        oldest = self.open[: max(len(self.open) - MOST_PENDING, 0)]
        assert all(each.task.cancelled() for each in oldest)
        del self.open[: len(oldest)]

    @rule(index=INDEX)
    def complete(self, index: int) -> None:
        if computing := self.of(True):
            opening = computing[index % len(computing)]
            opening.over.set()
            self.loop.run_for()
            assert opening.task.done()
            self.open.remove(opening)

    @rule(index=INDEX, also=st.booleans())
    def leave(self, index: int, also: bool) -> None:
        """One leaves, and perhaps the oldest handshake is completed in the same turn."""
        if not self.open:
            return
        leaving = [self.open[index % len(self.open)]]
        if also and (computing := self.of(True)):
            computing[0].over.set()
            leaving = list(dict.fromkeys([*leaving, computing[0]]))
        self.open[index % len(self.open)].task.cancel()
        self.loop.run_for()
        for each in leaving:
            assert each.task.done()
            self.open.remove(each)

    @rule(seconds=st.sampled_from([0.4, SLOT_SECONDS, 3.0]))
    def time_passes(self, seconds: float) -> None:
        waiting = {each.client for each in self.of(False)}
        self.loop.run_for(seconds)
        # Those that were ended in the last moment take note of it.
        self.loop.run_for()
        for each in [each for each in self.open if each.task.done()]:
            assert each.since is not None
            assert self.loop.time() - each.since >= SLOT_SECONDS
            assert waiting - {each.client}, "it was ended for nobody else"
            self.open.remove(each)

    @invariant()
    def slots_are_taken_by_those_that_compute(self) -> None:
        if not hasattr(self, "handshakes"):
            return
        assert not [each for each in self.open if each.task.done()]
        computing, waiting = self.of(True), self.of(False)
        assert self.handshakes.computing == len(computing) <= MOST_COMPUTING
        assert not waiting or len(computing) == MOST_COMPUTING
        for client in "abc":
            assert self.handshakes.pending(client) == [each.client for each in self.open].count(client)
            assert self.handshakes.waits(client) == any(each.client == client for each in waiting)

    def teardown(self) -> None:
        if not hasattr(self, "handshakes"):
            return
        while self.open:
            self.complete(0)
            self.slots_are_taken_by_those_that_compute()
        self.loop.run_for(2 * SLOT_SECONDS)
        assert not self.loop.timers()
        assert not self.loop.problems
        self.loop.close()
        self.patch.undo()


Handshakes.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHandshakes = Handshakes.TestCase
