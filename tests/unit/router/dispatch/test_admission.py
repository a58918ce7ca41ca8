"""Admission control: which requests are admitted, which wait, for how long, and that nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Overloaded
from common.messages.generation import SamplingParams
from common.messages.identity import NodeLoad, OtherRouters
from router.dispatch.admission import Admission, NodeRoom, Room, SlidingSum
from router.dispatch.generation import GenerationRequest
from router.nodes.registry import Node
from tests.fakes.clock import Clock
from tests.fakes.fake_node import registration
from tests.fakes.waiting import eventually

SMALL = Room(tokens=1000, requests=10, spare_tokens=0)


class Rig:
    """An admission whose room the test sets."""

    def __init__(self, room: Room = SMALL, longest_wait: float = 600.0) -> None:
        self.room = room
        self.clock = Clock()
        self.admission = Admission(lambda: self.room, 100, longest_wait, self.clock)
        self.inside: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(
        self,
        name: str,
        prompt: int,
        client: str = "a",
        max_tokens: int = 100,
        patience: float = 600.0,
        priority: int = 0,
    ) -> None:
        self.leave[name] = asyncio.Event()

        async def run() -> None:
            sampling = SamplingParams(max_tokens=max_tokens)
            asked = GenerationRequest(name, [1] * prompt, sampling, client=client, priority=priority)
            cost = self.admission.let_in(asked)
            if cost is None:
                cost = await self.admission.enter(asked, patience)
            try:
                self.inside.append(name)
                await self.leave[name].wait()
            finally:
                self.admission.leave(client, cost)

        self.tasks[name] = asyncio.create_task(run())

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await self.settle()

    def empty(self) -> None:
        assert (self.admission.tokens, self.admission.requests, self.admission.waiting) == (0, 0, 0)
        assert self.admission.clients == 0


async def test_what_fits_goes_in_at_once_and_the_rest_by_length() -> None:
    rig = Rig()
    rig.ask("first", 700)
    rig.ask("long", 600)
    rig.ask("middle", 300)
    rig.ask("short", 150)
    await rig.settle()
    assert rig.inside == ["first"]
    await rig.end("first")
    assert rig.inside == ["first", "short", "middle"]
    await rig.end("short")
    assert rig.inside == ["first", "short", "middle"], "the long request has to wait for room"
    await rig.end("middle")
    assert rig.inside[-1] == "long"
    await rig.end("long")
    rig.empty()


async def test_an_urgent_request_goes_in_first() -> None:
    rig = Rig()
    rig.ask("first", 800)
    rig.ask("normal", 700)
    rig.ask("modest", 600, priority=1)
    rig.ask("urgent", 800, priority=-1)
    await rig.settle()
    for name in ("first", "urgent", "normal", "modest"):
        assert rig.inside[-1] == name
        await rig.end(name)
    rig.empty()


async def test_a_short_request_of_another_client_is_served_before_200_long_ones() -> None:
    rig = Rig()
    for number in range(200):
        rig.ask(f"long-{number}", 700, client="greedy")
    await rig.settle()
    rig.ask("short", 20, client="modest")
    await rig.settle()
    assert rig.inside == ["long-0", "short"]
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)
    rig.empty()


async def test_a_request_larger_than_all_room_is_admitted_by_itself() -> None:
    rig = Rig()
    rig.ask("small", 10)
    await rig.settle()
    rig.ask("huge", 5000)
    await rig.settle()
    assert rig.inside == ["small"]
    await rig.end("small")
    assert rig.inside == ["small", "huge"]
    await rig.end("huge")
    rig.empty()


async def test_without_decode_nodes_the_gate_is_open() -> None:
    """Placement decides whether to wait for a node that returns, or to refuse."""
    rig = Rig(Room(0, 0, 0))
    for number in range(5):
        rig.ask(str(number), 100)
    await rig.settle()
    assert len(rig.inside) == 5
    for number in range(5):
        await rig.end(str(number))
    rig.empty()


async def test_room_that_nodes_report_lets_more_in() -> None:
    """Prompts that share cached pages take less than their sum."""
    rig = Rig(SMALL._replace(spare_tokens=500))
    for number in range(5):
        rig.ask(str(number), 300)
    await rig.settle()
    assert len(rig.inside) == 2, "recently admitted requests are not in the report yet"
    rig.clock.now += 2.0
    await eventually(lambda: len(rig.inside) == 3)
    rig.room = SMALL._replace(requests=3)
    rig.clock.now += 2.0
    await asyncio.sleep(0.3)
    assert len(rig.inside) == 3
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)
    rig.empty()


async def test_nobody_waits_longer_than_the_bound_and_retry_after_says_when() -> None:
    rig = Rig(longest_wait=0.05)
    rig.ask("first", 900)
    await rig.settle()
    rig.ask("second", 900)
    with pytest.raises(Overloaded, match="the cluster is overloaded"):
        await rig.tasks["second"]
    await rig.end("first")
    rig.empty()


async def test_a_wait_that_is_known_to_be_too_long_is_refused_at_once() -> None:
    rig = Rig(longest_wait=20.0)
    rig.ask("done", 900)
    await rig.settle()
    for number in range(4):
        rig.ask(f"waits-{number}", 900)
    await rig.settle()
    rig.clock.now += 10.0
    await rig.end("done")  # 1,000 tokens in ten seconds, while others waited
    assert rig.inside == ["done", "waits-0"]
    rig.ask("too-late", 900)
    await rig.settle()
    with pytest.raises(Overloaded) as refused:
        await rig.tasks["too-late"]
    assert 20.0 < refused.value.retry_after <= 60.0
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)
    rig.empty()


async def test_what_ended_while_nobody_waited_says_nothing_about_waits() -> None:
    """A burst after a quiet time is not refused because of the few requests before it."""
    rig = Rig(longest_wait=20.0)
    rig.ask("alone", 10)
    await rig.settle()
    await rig.end("alone")
    for number in range(40):
        rig.ask(str(number), 900)
    await rig.settle()
    assert (rig.admission.requests, rig.admission.waiting) == (1, 39)
    rig.clock.now += 1.0
    await rig.end("0")  # 1,000 tokens in one second
    rig.ask("late", 100)
    await rig.settle()
    with pytest.raises(Overloaded):
        await rig.tasks["late"]
    for number in range(1, 40):
        await rig.end(str(number))
    rig.empty()


async def test_the_first_requests_of_a_burst_that_end_are_no_measure() -> None:
    """Ten run at a time and take 2 s each, but the first one ends early: that is not one per second."""
    rig = Rig(longest_wait=20.0)
    for number in range(40):
        rig.ask(str(number), 50, max_tokens=50)
    await rig.settle()
    assert (rig.admission.requests, rig.admission.waiting) == (10, 30)
    rig.clock.now += 1.0
    await rig.end("0")
    rig.ask("late", 50, max_tokens=50)
    await rig.settle()
    assert rig.admission.waiting == 30, "it waits as the others do"
    rig.clock.now += 1.0
    for number in range(1, 10):
        await rig.end(str(number))
    rig.clock.now += 8.0
    rig.ask("later", 50, max_tokens=50)
    await rig.settle()
    with pytest.raises(Overloaded):
        await rig.tasks["later"]
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)
    rig.empty()


async def test_a_flood_of_one_client_refuses_no_other_client() -> None:
    """The flood's waiting requests are served after the other client's request, so they are no reason to refuse it."""
    rig = Rig(longest_wait=20.0)
    for number in range(30):
        rig.ask(f"flood-{number}", 900, client="greedy")
    await rig.settle()
    rig.clock.now += 10.0
    await rig.end("flood-0")
    rig.ask("more", 900, client="greedy")
    rig.ask("modest", 500, client="modest")
    await rig.settle()
    with pytest.raises(Overloaded):
        await rig.tasks["more"]
    await rig.end("flood-1")
    await rig.end("flood-2")
    assert rig.inside == ["flood-0", "flood-1", "flood-2", "modest"], "they take turns"
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)
    rig.empty()


def test_what_a_sliding_sum_has_forgotten_takes_no_memory() -> None:
    clock = Clock()
    recent = SlidingSum(10.0, clock)
    for _ in range(1000):
        recent.add(5)
        clock.now += 1.0
    assert len(recent) <= 11
    assert recent.total() == 5 * 10


async def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    rig = Rig()
    rig.ask("first", 900)
    rig.ask("second", 900)
    rig.ask("third", 50)
    await rig.settle()
    rig.tasks["second"].cancel()
    await asyncio.gather(rig.tasks["second"], return_exceptions=True)
    await rig.end("first")
    assert rig.inside == ["first", "third"]
    await rig.end("third")
    rig.empty()


async def test_a_router_that_shuts_down_opens_the_gate() -> None:
    rig = Rig()
    for number in range(4):
        rig.ask(str(number), 900)
    await rig.settle()
    rig.admission.open_all()
    await rig.settle()
    assert len(rig.inside) == 4
    for number in range(4):
        await rig.end(str(number))
    rig.empty()


class Listed(list[Node]):
    """The nodes of a registry."""

    version = 1

    def __init__(self, *nodes: Node) -> None:
        super().__init__(nodes)
        self.heard: set[str] = set()

    def node(self, incarnation: str) -> Node:
        return next(each for each in self if each.incarnation == incarnation)


def test_the_room_of_nodes_is_that_of_decode_nodes_that_are_up() -> None:
    up = Node(registration("decode", "decode-0"), 0.0)
    up.load = NodeLoad(total_pages=100, free_pages=40, cached_pages=10)
    busy = Node(registration("decode", "decode-1"), 0.0)
    busy.load = NodeLoad(total_pages=100, free_pages=100, queued=1)
    leaving = Node(registration("decode", "decode-2"), 0.0, state="draining")
    prefill = Node(registration("prefill", "prefill-0"), 0.0)
    nodes = Listed(up, busy, leaving, prefill)
    room = NodeRoom(nodes, 8)
    assert room() == Room(tokens=2 * 100 * 16, requests=16, spare_tokens=50 * 16 // 2)
    up.load = NodeLoad(total_pages=100, free_pages=10)
    assert room().spare_tokens == 50 * 16 // 2, "not added up for each request"
    nodes.heard.add(up.incarnation)
    assert room() == Room(tokens=2 * 100 * 16, requests=16, spare_tokens=10 * 16 // 2)
    assert not nodes.heard
    nodes.remove(busy)
    nodes.version += 1
    assert room() == Room(tokens=100 * 16, requests=8, spare_tokens=10 * 16 // 2)


def test_each_router_may_use_its_share_and_what_the_others_leave() -> None:
    load = NodeLoad(total_pages=100, free_pages=60)
    node = Node(registration("decode", "decode-0"), 0.0, load=load)
    node.others = OtherRouters(routers=3, requests=2)
    nodes = Listed(node)
    room = NodeRoom(nodes, 8)
    assert room() == Room(tokens=100 * 16 // 4, requests=6, spare_tokens=60 * 16 // 2 // 4)
    # The others have taken all: this router still has its share.
    node.others = OtherRouters(routers=3, requests=8)
    nodes.version += 1
    assert room().requests == 2
