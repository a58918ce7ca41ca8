"""Each call at which a node may meet a failure or an event meets one, in a run of its own.

In every run all requests end with the right tokens, after further attempts where those are needed, and no node holds
anything. Without TANDEM_EXPLORE=1 one call of each kind fails, and one event comes in between.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

import decode_node.peers
from common.errors import ClientGone, HandshakeRefused, Overloaded
from common.messages.node_inbox import FlushCache, PeerDraining, PeerLost
from common.node.completion import Deferred
from common.node.host_store import HostStore
from kv_transfer.limits import TransferLimits
from tests.fakes.failing_calls import EXPLORE, FailingCalls, fail_with, numbers
from tests.fakes.fake_link import FakeLink
from tests.fakes.late_host import late_lanes
from tests.fakes.loopback import Damage, Fault, LoopbackReceiver, LoopbackSender
from tests.fakes.node_cluster import Call, DecodeSide, HostShape, NodeCluster, PrefillSide, Shape
from tests.fakes.plan_wire import WirePromptWorker, WireWorker
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.fakes.tiny_grammar import NUMBERS, TinyCompiler, tiny_compiler

ROLES = ("prefill", "decode")
DAMAGES: tuple[Damage, ...] = ("drop", "fail", "truncate", "corrupt", "duplicate", "stick")
HOST = HostShape(blocks=24, lanes=late_lanes)
SHAPE = Shape(
    page_size=4,
    chunk_tokens=8,
    prefill_pool=96,
    decode_pool=96,
    prefill_batch=2,
    max_running=3,
    max_transferring=3,
    reserved_tokens=4,
    completion=Deferred,
    checks_later=True,
    host=HOST,
    decode_host=HOST,
    grammars=tiny_compiler(),
    transfer=TransferLimits(record_bytes=8192, slots_timeout=3.0, first_page_timeout=3.0, stall_timeout=1.0),
)


class Nodes:
    """A cluster whose nodes end when their device fails, as their processes would, and are started again."""

    def __init__(self) -> None:
        self.cluster = NodeCluster(SHAPE)
        self.asked: list[Call] = []
        self.ending: list[str] = []  # roles of nodes that end after the present turn

    def node(self, role: str) -> PrefillSide | DecodeSide:
        sides = self.cluster.prefills if role == "prefill" else self.cluster.decodes
        return next(side for side in sides if side.alive)

    def ask(self, prompt: list[int], most: int, **more: Any) -> Call:
        places = len(self.cluster.prefills) - 1, len(self.cluster.decodes) - 1  # of the living nodes
        self.asked.append(self.cluster.submit(prompt, most, *places, **more))
        return self.asked[-1]

    def turn(self, count: int = 1, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.cluster.clock.now += seconds
            for role in ("prefill", "decode"):
                try:
                    self.cluster.turn_one(self.node(role))
                except RuntimeError:
                    self.ending.append(role)
                for each in self.ending:
                    self._end(self.node(each))
                self.ending.clear()

    def _end(self, side: PrefillSide | DecodeSide) -> None:
        self.cluster.kill(side)
        self.cluster.restart(side)
        self.cluster.lose(side)

    def run(self) -> None:
        for number in range(3000):
            if all(call.over for call in self.cluster.calls):
                return
            if number == 1500:
                self.cluster.fabric.unstick()
            self.turn(seconds=0.0 if number < 300 else 0.05)
        raise AssertionError(f"nothing ends: {self.cluster.describe()}")

    def script(self) -> None:
        """Serve chunks, early and late grants, cached prefixes, a grammar, an abort, retractions, host memory."""
        shared = prompt_of(24)
        first = self.ask(shared, 6)
        self.ask(shared[:16] + prompt_of(6, 1), 20, seed=3, **SAMPLED)
        self.ask(prompt_of(9), 30, grammar=NUMBERS)
        self.turn(4)
        self.ask(prompt_of(11, 5), 24)
        self.ask(prompt_of(5, 2), 30, legs="pd")
        self.ask(prompt_of(12, 7), 1)
        self.turn(6)
        left = self.ask(prompt_of(20, 8), 30)
        self.turn(5)
        if not left.over:
            self.cluster.abort(left)
        self.run()
        self.ask([*shared, *first.ids, 5], 5)
        self.run()
        self.ask(shared, 4)
        self.ask(prompt_of(40, 9), 5)
        self.run()

    def check(self, *refusals: str) -> None:
        """Expect the right tokens, unless a request has ended with one of these codes, and that nothing is held."""
        ended = [call for call in self.asked if not call.aborted]
        refused = [call for call in ended if call.error is not None and call.error.code in refusals]
        assert len(refused) <= 1
        expect_reference(*(call for call in ended if call not in refused))
        self.cluster.fabric.unstick()
        self.turn(28, seconds=2.5)  # in which rooms and records that have ended are forgotten
        self.cluster.settle(limit=2000)


Action = Callable[[Nodes], object]
DEVICE = fail_with(lambda: RuntimeError("CUDA error: an illegal memory access was encountered"))
NO_DESCRIPTOR = fail_with(lambda: OSError(errno.EMFILE, "Too many open files"))
REFUSED = fail_with(lambda: HandshakeRefused("its process cannot be watched"))
FAILURES: list[tuple[Any, str, Callable[[], object]]] = [
    (WirePromptWorker, "apply", DEVICE),
    (WirePromptWorker, "send", DEVICE),
    (WireWorker, "apply", DEVICE),
    (WireWorker, "draw", DEVICE),
    (HostStore, "store", DEVICE),
    (HostStore, "load", DEVICE),
    (LoopbackSender, "attach", NO_DESCRIPTOR),
    (LoopbackSender, "attach", REFUSED),
    (LoopbackReceiver, "admit", REFUSED),
    (LoopbackReceiver, "start_digests", fail_with(lambda: MemoryError("no memory for the checksums"))),
    (decode_node.peers, "Dealer", fail_with(lambda: zmq.ZMQError(errno.EMFILE))),
    (TinyCompiler, "start", fail_with(lambda: Overloaded("compiling grammars keeps this node busy"))),
]


@contextmanager
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.cluster.close()


def run(calls: FailingCalls, name: str, number: int, action: Action, refusals: tuple[str, ...]) -> None:
    with nodes() as made:
        calls.arm(name, number, lambda: action(made))
        made.script()
        assert calls.reached, f"call {number} of {name}"
        made.check(*refusals)


def counted(watched: Iterable[tuple[Any, str]]) -> Counter[str]:
    """Return how often the script makes these calls when nothing fails."""
    calls = FailingCalls()
    with pytest.MonkeyPatch.context() as patch, nodes() as made:
        for owner, method in set(watched):
            calls.watch(patch, owner, method)
        made.script()
        counts = calls.counts.copy()
        made.check()
    return counts


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    return counted((owner, method) for owner, method, _ in FAILURES)


@pytest.mark.parametrize(("owner", "method", "fail"), FAILURES)
def test_a_call_that_fails(
    owner: Any,
    method: str,
    fail: Callable[[], object],
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = FailingCalls()
    name = calls.watch(monkeypatch, owner, method)
    # The client is told that a grammar cannot be compiled now.
    refusals = (Overloaded.code,) if owner is TinyCompiler else ()
    assert counts[name]
    for number in numbers(counts[name], 1):
        run(calls, name, number, lambda made: fail(), refusals)


def _open_call(made: Nodes, place: int) -> Call | None:
    found = [call for call in made.cluster.calls if not call.over]
    return found[place % len(found)] if found else None


def _abort(place: int) -> Action:
    def action(made: Nodes) -> None:
        if (call := _open_call(made, place)) is not None:
            made.cluster.abort(call)

    return action


def _tell(role: str, message: Callable[[str], Any]) -> Action:
    """Deliver a message about the node of the other role."""

    def action(made: Nodes) -> None:
        other = made.node("prefill" if role == "decode" else "decode")
        made.node(role).link.deliver(message(other.ref.incarnation))

    return action


def _lose_router(made: Nodes) -> None:
    for role in ("prefill", "decode"):
        made.node(role).link.router_lost = True


def _damage(damage: Damage, delay: float = 0.0) -> Action:
    """Damage the next write."""

    def action(made: Nodes) -> None:
        fabric = made.cluster.fabric
        due = fabric.writes
        fabric.plan = lambda number: Fault(delay, damage) if number == due else Fault()

    return action


EVENTS: dict[str, Action] = {
    **{f"abort {place}": _abort(place) for place in range(3)},
    **{f"{role} told of loss": _tell(role, lambda each: PeerLost(incarnation=each)) for role in ROLES},
    **{f"{role} flushed": _tell(role, lambda each: FlushCache()) for role in ROLES},
    "decode node drains": _tell("prefill", lambda each: PeerDraining(incarnation=each)),
    "router lost": _lose_router,
    **{f"{role} ends": lambda made, role=role: made.ending.append(role) for role in ROLES},  # type: ignore[misc]
    **{f"write: {each}": _damage(each) for each in DAMAGES},
    "late write": _damage("none", 5.0),
}


@pytest.mark.timeout(3600 if EXPLORE else 300)
@pytest.mark.parametrize("event", EVENTS if EXPLORE else ["prefill ends"])
def test_an_event_at_any_time(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = counted([(FakeLink, "drain")]).total()
    calls = FailingCalls()
    name = calls.watch(monkeypatch, FakeLink, "drain")
    for number in numbers(count, 1):
        run(calls, name, number, EVENTS[event], (ClientGone.code,))
