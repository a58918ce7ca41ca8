"""A router's sockets to the KV events of nodes, against the publisher that nodes have."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from common.kv_cache.radix_cache import RadixCache
from common.kv_events import publisher
from common.kv_events.plan import KvEventsPlan
from common.kv_events.publisher import KvEventPublisher
from common.kv_events.wire import GPU, Batch, decode, encode
from common.observability.logs import Log
from router.nodes import event_feed, event_reader
from router.nodes.event_reader import LOOK_SECONDS, LOOKUP_SECONDS, EventReader
from router.nodes.registration import ExpectedNode, RegistrationRules
from router.nodes.registry import Node
from tests.fakes.free_ports import free_ports
from tests.fakes.ipv6 import needs_ipv6
from tests.fakes.waiting import PATIENCE
from tests.unit.router.nodes.test_cache_aware import Fleet

PAGE = 64


class Rig:
    """A router with one prefill node that publishes, and one that does not."""

    def __init__(self, events: str, replay: str) -> None:
        """Events and answers come from these addresses."""
        self.spent = 0.0  # seconds that reading has taken besides
        self.stands_at: float | None = None  # when the clock was stopped
        self.fleet = Fleet("cache_events", 2)
        self.gaps: list[int] = []
        self.node, self.other = self.fleet.node("p000"), self.fleet.node("p001")
        self.plan = KvEventsPlan(
            address=events,
            replay_address=replay,
            topic="kv@p000@tiny",
            block_tokens=PAGE,
            token_ids=True,
            replay_batches=100,
            max_queue=1000,
        )
        self.announce(self.node, self.plan.address, self.plan.replay_address)
        expected = ExpectedNode("prefill", "", 1, None, events=(self.plan.address, self.plan.replay_address))
        rules = RegistrationRules({"p000": expected, "p001": expected}, 16, 1 << 20, 1000)
        self.reported = self.fleet.placer.history.reported
        self.reader = EventReader(
            self.fleet.registry, rules, self.reported, PAGE, self._now, Log("router"), self.gaps.append
        )
        self.reader.open()
        self.publisher = KvEventPublisher(self.plan, Log("prefill-0"))
        self.cache = RadixCache(PAGE, observer=self.publisher.tap(GPU, PAGE, 0))

    def _now(self) -> float:
        return (time.monotonic() if self.stands_at is None else self.stands_at) + self.spent

    def announce(self, node: Node, events: str, replay: str) -> None:
        said = {"kv_events": events, "kv_events_replay": replay}
        node.register = replace(node.register, effective_config=said)

    def insert(self, number: int) -> list[int]:
        """Cache a prompt of one block; return the prompt."""
        prompt = [number] * PAGE
        self.cache.insert(np.array(prompt), [number + 1])
        return prompt

    def cached(self, prompt: list[int]) -> int:
        history, placed = self.fleet.placer.history, self.fleet.prompt([*prompt, 1])
        return history.cached_tokens(history.matches("prefill", placed), self.node, placed)

    def turns_until(self, what: str, done: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, what
            self.reader.turn()
            time.sleep(0.002)

    @property
    def follows(self) -> bool:
        return self.node.incarnation in self.reported.following

    def close(self) -> None:
        self.reader.close()
        self.publisher.close()


def said(caplog: pytest.LogCaptureFixture) -> str:
    """Return all log lines with their fields."""
    return "\n".join(str(vars(record)) for record in caplog.records)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    yield made
    made.close()


class Names:
    """A DNS server whose answers the test sets."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked: list[str] = []

    def getaddrinfo(self, name: str, *_: object, **__: object) -> list[Any]:
        found = self.addresses
        self.asked.append(name)
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture
def named(names: Names) -> Iterator[Rig]:
    """A node whose address has the name of its host."""
    made = Rig(*(f"tcp://tandem-prefill:{port}" for port in free_ports(2)))
    yield made
    made.close()


def test_what_a_node_held_before_and_what_it_says_later_is_known(rig: Rig) -> None:
    before = rig.insert(1)
    rig.publisher.start()
    rig.turns_until("no snapshot", lambda: rig.follows and rig.cached(before) == PAGE)
    later = rig.insert(2)
    rig.turns_until("no event", lambda: rig.cached(later) == PAGE)
    rig.cache.evict(1)
    rig.turns_until("no eviction", lambda: rig.cached(before) == 0)
    assert rig.cached(later) == PAGE
    rig.cache.evict(1)
    rig.turns_until("no second eviction", lambda: rig.cached(later) == 0)
    assert rig.reported.following == {rig.node.incarnation}, "the other one publishes nothing"


@pytest.mark.parametrize(
    "addresses", [pytest.param(["::1"], marks=needs_ipv6), ["127.0.0.1"], ["::1", "127.0.0.1"]]
)
def test_a_node_is_found_by_the_name_of_its_host(named: Rig, names: Names, addresses: list[str]) -> None:
    """It listens at its IPv4 address, or at its IPv6 address if it has no other."""
    names.addresses = addresses
    named.publisher.start()
    before = named.insert(1)
    named.turns_until("no snapshot", lambda: named.follows and named.cached(before) == PAGE)
    later = named.insert(2)
    named.turns_until("no event", lambda: named.cached(later) == PAGE)


def test_a_name_that_is_not_found_yet_is_looked_up_again(
    named: Rig, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    names.addresses = ["127.0.0.1"]
    named.publisher.start()
    prompt = named.insert(1)
    names.addresses = []
    named.turns_until("not looked up", lambda: len(names.asked) >= 4)
    named.spent += LOOKUP_SECONDS
    named.turns_until("not told", lambda: "name resolution" in said(caplog))
    names.addresses = ["127.0.0.1"]
    named.spent += LOOKUP_SECONDS
    named.turns_until("not followed", lambda: named.follows and named.cached(prompt) == PAGE)


def test_a_host_that_does_not_answer_is_looked_up_again(named: Rig, names: Names) -> None:
    names.addresses = ["127.0.0.1"]
    named.publisher.start()
    prompt = named.insert(1)
    names.addresses = ["127.0.0.2"]
    named.reader.turn()
    named.turns_until("not looked up", lambda: len(names.asked) >= 4)
    names.addresses = ["127.0.0.1"]

    def follows() -> bool:
        named.spent += 0.2
        return named.follows and named.cached(prompt) == PAGE

    named.turns_until("not followed", follows)
    later = named.insert(2)
    named.turns_until("no event", lambda: named.cached(later) == PAGE)


def test_a_gap_is_filled(rig: Rig) -> None:
    rig.publisher.start()
    rig.insert(1)
    rig.turns_until("nothing is heard", lambda: rig.follows)
    rig.publisher.dropped += 1
    missing = rig.insert(2)
    rig.turns_until("no gap", lambda: rig.gaps)
    rig.turns_until("not filled", lambda: rig.follows and rig.cached(missing) == PAGE)
    assert rig.gaps == [1]


def test_a_node_whose_publisher_met_a_defect_is_followed_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(*arguments: Any) -> bytes:
        monkeypatch.setattr(publisher, "encode", encode)
        raise RuntimeError("a defect")

    rig.publisher.start()
    before = rig.insert(1)
    rig.turns_until("nothing is heard", lambda: rig.cached(before) == PAGE)
    monkeypatch.setattr(publisher, "encode", fail_once)
    rig.insert(2)
    rig.turns_until("what was told stays", lambda: rig.follows and rig.cached(before) == 0)
    later = rig.insert(3)
    rig.turns_until("no event", lambda: rig.follows and rig.cached(later) == PAGE)


def test_a_lost_node_is_forgotten_whatever_it_still_says(rig: Rig) -> None:
    rig.publisher.start()
    prompt = rig.insert(1)
    rig.turns_until("nothing is heard", lambda: rig.cached(prompt) == PAGE)
    rig.fleet.registry.lose(rig.node, "its process ended", "closed")
    rig.fleet.placer.history.lost(rig.node)
    last = rig.insert(2)
    rig.turns_until("not heard", lambda: rig.cached(last) == PAGE)
    time.sleep(LOOK_SECONDS)
    rig.insert(3)
    for _ in range(20):
        rig.reader.turn()
        time.sleep(0.005)
    assert rig.fleet.placer.history.blocks == 0
    assert not rig.follows


def test_a_node_that_publishes_elsewhere_than_the_file_says_is_not_read(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig.announce(rig.node, f"ipc://{tmp_path}/elsewhere", rig.plan.replay_address)
    rig.reader.turn()
    assert not rig.follows
    assert "the cluster file says" in said(caplog)


def test_what_cannot_be_read_is_refused_and_the_node_followed_all_the_same(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as other:
        other.bind(rig.plan.address)

        def refused() -> bool:
            other.send_multipart((b"", bytes(8), b"nonsense"))
            other.send_multipart((b"", bytes(8)))
            return "not a batch of KV events" in said(caplog)

        rig.turns_until("not connected", refused)
    assert not rig.follows
    rig.publisher.start()
    prompt = rig.insert(1)
    rig.turns_until("not followed", lambda: rig.cached(prompt) == PAGE)


def test_a_node_whose_messages_take_long_is_read_less_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def slowly(payload: bytes) -> Batch:
        rig.spent += 0.3
        read.append(payload)
        return decode(payload)

    monkeypatch.setattr(event_reader, "decode", slowly)
    rig.stands_at = time.monotonic()  # the rest ends when the test says so
    message = (b"", bytes(8), encode(Batch(0.0, [], 0)))
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as other:
        other.bind(rig.plan.address)
        rig.turns_until("not connected", lambda: other.send_multipart(message) or read)
        assert len(read) == 1, "a turn read on although it had taken long"
        for _ in range(30):
            other.send_multipart(message)
        time.sleep(0.05)
        for _ in range(3):
            rig.reader.turn()
        assert len(read) == 1, "the node did not rest"
        rig.spent += 0.4 * event_reader.REST
        rig.turns_until("not read after the rest", lambda: len(read) == 2)


async def test_it_reads_on_the_event_loop(rig: Rig) -> None:
    rig.publisher.start()
    prompt = rig.insert(1)
    rig.reader.start()
    async with asyncio.timeout(PATIENCE):
        while rig.cached(prompt) != PAGE:
            await asyncio.sleep(0.01)


async def test_without_a_policy_that_asks_nothing_is_read() -> None:
    fleet = Fleet("cache_aware", 1)
    reported = fleet.placer.history.reported
    rules = RegistrationRules({}, 16, 1 << 20, 1000)
    reader = EventReader(fleet.registry, rules, reported, PAGE, time.monotonic, Log("router"), print)
    reader.start()
    assert reported.roles == frozenset()
    assert len(asyncio.all_tasks()) == 1
    reader.close()


async def test_a_lack_of_descriptors_delays_it_and_does_not_end_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Any = zmq.Context.socket
    failing: list[int] = [zmq.SUB, zmq.DEALER]

    def fail_once(context: zmq.Context[Any], kind: int) -> Any:
        if kind in failing:
            failing.remove(kind)
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, kind)

    monkeypatch.setattr(event_feed, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(event_feed, "MIN_PAUSE", 0.01)
    rig.publisher.start()
    prompt = rig.insert(1)
    rig.reader.start()
    monkeypatch.setattr(zmq.Context, "socket", fail_once)
    async with asyncio.timeout(PATIENCE):
        while rig.cached(prompt) != PAGE:
            await asyncio.sleep(0.01)
    assert not failing


async def test_a_connection_that_fails_at_once_delays_it_and_does_not_end_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Any = zmq.Socket.connect
    failing = [zmq.SUB, zmq.DEALER]

    def fail_once(socket: Any, address: str) -> Any:
        if socket.type in failing:
            failing.remove(socket.type)
            raise zmq.ZMQError(errno.EINVAL)
        return connect(socket, address)

    monkeypatch.setattr(event_feed, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(event_feed, "MIN_PAUSE", 0.01)
    monkeypatch.setattr(zmq.Socket, "connect", fail_once)
    rig.publisher.start()
    prompt = rig.insert(1)
    rig.reader.start()
    async with asyncio.timeout(PATIENCE):
        while rig.cached(prompt) != PAGE:
            await asyncio.sleep(0.01)
    assert not failing


async def test_the_thread_of_its_sockets_starts_with_it() -> None:
    """Later there may be no descriptor for the thread, without which libzmq ends the process."""
    fleet = Fleet("cache_events", 0)
    reported = fleet.placer.history.reported
    rules = RegistrationRules({}, 16, 1 << 20, 1000)
    reader = EventReader(fleet.registry, rules, reported, PAGE, time.monotonic, Log("router"), print)
    before = set(os.listdir("/proc/self/task"))
    reader.start()
    assert set(os.listdir("/proc/self/task")) - before
    reader.close()
