"""Sender, Receiver and loopback under random faults: who may write where, and that everything ends.

Checked for every byte that lands: its page and record slot belong to exactly that generation. Checked at every step:
each page is exactly one of free, held and quarantined. Checked at every arrival: the bytes equal the source's. Checked
at the end: once the faults are over, nothing remains.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import RequestError
from kv_transfer.events import (
    Arrived,
    Delivered,
    PagesFree,
    PeerForgot,
    PeerRefused,
    RoomFailed,
    SlotsGranted,
    TransferLost,
)
from kv_transfer.state import ReceiveState
from kv_transfer.transport.base import Region
from tests.fakes.loopback import Damage, Fabric, Fault
from tests.unit.kv_transfer.rig import LIMITS, RECORD, Clock, Decode, Prefill, same_pages

POOL = 7
SLOTS = 3
SOURCE = st.lists(st.integers(0, 15), min_size=8, max_size=8)

UNDAMAGED: Damage = "none"
DAMAGES: tuple[Damage, ...] = (*get_args(Damage), *[UNDAMAGED] * 8)
FAULTS = st.builds(Fault, st.sampled_from([0.0, 0.0, 0.0, 0.5, 5.0, 40.0]), st.sampled_from(DAMAGES))


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.faults: deque[Fault] = deque()
        self.fabric = Fabric(self.clock, lambda _: self.faults.popleft() if self.faults else Fault())
        self.fabric.observers.append(self.landing)
        self.rooms = 0
        self.free = set(range(POOL))
        # room -> (generation, pages), until PagesFree or Arrived.
        self.held: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.source: dict[int, list[int]] = {}  # room -> source pages
        self.expected: dict[int, int] = {}  # room -> pages sent, on the living prefill node
        self.corrupting: set[int] = set()  # generations whose writes were damaged
        self.to_prefill: deque[bytes] = deque()
        self.arrived = 0

    @initialize(fencing=st.booleans(), abandons=st.booleans())
    def start(self, fencing: bool, abandons: bool) -> None:
        self.fabric.abandons = abandons
        incarnation = secrets.token_hex(16)
        self.decode = Decode(
            self.clock,
            self.fabric.receiver(incarnation, fencing=fencing),
            incarnation=incarnation,
            record_slots=SLOTS,
        )
        self.fencing = fencing
        self.seed = 0
        self.new_prefill()
        self.deliver(4)

    def new_prefill(self) -> None:
        self.seed += 1
        incarnation = secrets.token_hex(16)
        self.prefill = Prefill(
            self.clock, self.fabric.sender(incarnation), seed=self.seed, incarnation=incarnation
        )
        self.expected.clear()
        self.to_prefill.clear()
        self.connect()

    def connect(self) -> None:
        self.decode.connect(self.prefill, self.to_prefill.append)

    def landing(self, receiver: str, region: Region, start: int, length: int, generation: int) -> None:
        """Called when a write is about to land."""
        if self.fencing and generation not in self.decode.endpoint.windows:  # type: ignore[attr-defined]
            raise AssertionError("the fence let something through")
        if region is Region.RECORDS:
            slot = start // LIMITS.record_bytes
            owners = [room for room in self.decode.receiver.rooms.parts() if room.record_slot == slot]
            assert [room.generation for room in owners] == [generation]
            return
        plane = max((p for p in self.decode.layout.planes if p.offset <= start), key=lambda p: p.offset)
        first, last = (
            (start - plane.offset) // plane.page_bytes,
            (start + length - 1 - plane.offset) // plane.page_bytes,
        )
        mine = next((pages for g, pages in self.held.values() if g == generation), ())
        assert set(range(first, last + 1)) <= set(mine), "a write into pages of nobody or somebody else"

    # ---- actions of nodes

    @rule(
        count=st.integers(0, 3),
        held=st.integers(0, 2),
        source=SOURCE,
        deadline=st.none() | st.integers(1, 200),
    )
    def open(self, count: int, held: int, source: list[int], deadline: int | None) -> None:
        if count > len(self.free):
            return
        self.rooms += 1
        pages = tuple(sorted(self.free))[:count]
        until = None if deadline is None else self.clock.now + deadline
        try:
            generation = self.decode.receiver.open(
                self.rooms, (self.prefill.incarnation,), pages, held, until
            )
        except RequestError:
            return
        self.free -= set(pages)
        self.held[self.rooms] = (generation, pages)
        self.source[self.rooms] = source[:count]

    @rule(
        count=st.integers(1, 3),
        held=st.integers(0, 2),
        source=SOURCE,
        fault=FAULTS,
        finish=st.sampled_from([True, True, False]),
    )
    def begin(self, count: int, held: int, source: list[int], fault: Fault, finish: bool) -> None:
        """Run the usual sequence at once, with one fault: random single steps seldom get this far."""
        self.open(count, held, source, None)
        self.expect(0)
        self.deliver(8)
        self.faults.append(fault)
        self.write(len(self.expected) - 1, 3, finish)

    @rule(back=st.integers(0, 3))
    def expect(self, back: int) -> None:
        room = self.rooms - back
        if room > 0 and room not in self.expected:
            self.prefill.sender.expect(room)
            self.expected[room] = 0

    @rule(pick=st.integers(0, 3), count=st.integers(1, 3), finish=st.sampled_from([True, True, False]))
    def write(self, pick: int, count: int, finish: bool) -> None:
        granted = [
            room for room in self.expected if self.prefill.sender.slots(room) and self.expected[room] >= 0
        ]
        if not granted:
            return
        room = granted[min(pick, len(granted) - 1)]
        slots = self.prefill.sender.slots(room)
        assert slots is not None
        sent = self.expected[room]
        chunk = self.source[room][sent : sent + count]
        self.prefill.sender.send_pages(room, chunk, slots.held_pages + sent)
        self.expected[room] += len(chunk)
        if finish and self.expected[room] == slots.num_pages:
            self.prefill.sender.finish(room, RECORD)
            self.expected[room] = -1

    @rule(back=st.integers(0, 3))
    def cancel(self, back: int) -> None:
        self.prefill.sender.cancel(self.rooms - back, "finished", "cancelled")

    @rule(back=st.integers(0, 3))
    def abort(self, back: int) -> None:
        room = self.rooms - back
        if room in self.held:
            self.decode.receiver.abort(room, "aborted")

    @rule(n=st.integers(1, 30))
    def go_on(self, n: int) -> None:
        self.deliver(n)
        self.poll()

    @rule(n=st.integers(10, 30))
    def go_on_further(self, n: int) -> None:
        self.go_on(n)

    @rule()
    def poll(self) -> None:
        for told in self.prefill.poll():
            assert isinstance(told, SlotsGranted | Delivered | TransferLost)
        for event in self.decode.receiver.poll():
            if isinstance(event, Arrived):
                _, pages = self.held.pop(event.room)
                assert same_pages(self.prefill, self.source[event.room], self.decode, pages)
                self.decode.receiver.close(event.room)
                self.free |= set(pages)
                self.arrived += 1
            elif isinstance(event, PagesFree):
                _, pages = self.held.pop(event.room)
                assert pages == event.pages
                self.free |= set(pages)
            elif isinstance(event, PeerRefused | PeerForgot):
                if event.incarnation == self.prefill.incarnation:
                    self.connect()
            else:
                assert isinstance(event, RoomFailed)
                assert event.room in self.held

    # ---- events in the environment

    @rule(n=st.integers(1, 8))
    def deliver(self, n: int) -> None:
        for _ in range(n):
            if self.to_prefill:
                self.prefill.sender.handle(self.decode.identity, self.to_prefill.popleft())
            if self.decode.inbox:
                self.decode.receiver.handle(*self.decode.inbox.popleft())

    @rule(which=st.booleans(), twice=st.booleans())
    def lose_or_repeat_a_frame(self, which: bool, twice: bool) -> None:
        queue: deque[bytes] | deque[tuple[str, bytes]] = self.to_prefill if which else self.decode.inbox
        if not queue:
            return
        if twice:
            queue.append(queue[0])  # type: ignore[arg-type]
        else:
            queue.popleft()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.fabric.advance()

    @rule(fault=FAULTS)
    def fault_ahead(self, fault: Fault) -> None:
        self.faults.append(fault)

    def unstick(self) -> None:
        self.fabric.unstick()
        self.fabric.advance()

    def prefill_node_is_believed_lost(self) -> None:
        self.decode.receiver.peer_lost(self.prefill.incarnation)
        self.poll()
        self.connect()

    def decode_node_is_believed_lost(self) -> None:
        self.prefill.sender.peer_lost(self.decode.incarnation)

    def prefill_node_dies(self) -> None:
        self.fabric.kill(self.prefill.incarnation)
        self.poll()
        self.decode.inbox.clear()
        self.new_prefill()

    @rule(
        what=st.sampled_from(
            [
                "unstick",
                "unstick",
                "prefill_node_is_believed_lost",
                "decode_node_is_believed_lost",
                "prefill_node_dies",
            ]
        )
    )
    def mishap(self, what: str) -> None:
        getattr(self, what)()

    # ---- invariants

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        held = [page for _, pages in self.held.values() for page in pages]
        assert sorted([*held, *self.free]) == list(range(POOL))
        rooms = self.decode.receiver.rooms.parts() if hasattr(self, "decode") else ()
        quarantined = {
            page for room in rooms if room.state is ReceiveState.QUARANTINED for page in room.pages
        }
        assert quarantined <= set(held)
        if hasattr(self, "decode"):
            taken = [room.record_slot for room in rooms]
            assert sorted([*taken, *self.decode.receiver.rooms.free_record_slots]) == list(range(SLOTS))

    def settle(self) -> None:
        for _ in range(8):
            self.unstick()
            for _ in range(10):
                self.deliver(50)
                self.poll()
            self.time_passes(45.0)
        self.poll()

    def teardown(self) -> None:
        """The faults are over: everything must end without outside help."""
        if not hasattr(self, "decode"):
            return
        self.faults.clear()
        self.settle()
        # A node may work on a granted room for as long as it reports so; every request has its own deadline.
        for room in [*self.expected]:
            self.prefill.sender.cancel(room, "deadline_exceeded", "the request's deadline passed")
        self.settle()
        assert self.prefill.sender.active == 0
        assert self.decode.receiver.active == 0
        assert self.free == set(range(POOL))


Transfers.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestTransfers = pytest.mark.timeout(600)(Transfers.TestCase)  # shrinking a failure takes minutes
