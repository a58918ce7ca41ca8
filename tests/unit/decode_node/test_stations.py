"""A request may end at any station for any reason: afterwards both nodes hold nothing, and others continue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.messages.router_inbox import Failed
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import combinations
from tests.fakes.loopback import Fault
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of

LONG = 30  # prompt tokens: four chunks


class _Station:
    """How a request gets to a station, and how to see that it is there."""

    def __init__(
        self,
        where: str,
        reached: Callable[[NodeCluster, Call], bool],
        legs: str = "dp",
        plan: Callable[[int], Fault] = lambda n: Fault(),
        before: int = 0,
    ) -> None:
        self.where, self.reached, self.legs, self.plan, self.before = where, reached, legs, plan, before


def _in(side: str, queue: str) -> Callable[[NodeCluster, Call], bool]:
    def reached(cluster: NodeCluster, call: Call) -> bool:
        requests = getattr(getattr(cluster, side).node.queues, queue)
        rooms = [r.room for r in (requests.values() if isinstance(requests, dict) else requests)]
        return call.room in rooms

    return reached


def _computed(least: int, in_flight: bool) -> Callable[[NodeCluster, Call], bool]:
    def reached(cluster: NodeCluster, call: Call) -> bool:
        request = cluster.prefill.node.queues.computing.get(call.room)
        return request is not None and request.computed >= least and (request.in_flight > 0) is in_flight

    return reached


def _never(n: int) -> Fault:
    return Fault(delay=1e9)


STATIONS = {
    "prompt waits for pages": _Station("prefill", _in("prefill", "waiting"), before=5),
    "prompt waits for pages, no reservation": _Station(
        "prefill", _in("prefill", "waiting"), legs="p", before=5
    ),
    "reservation waits for pages": _Station("decode", _in("decode", "waiting"), before=4),
    "reserved, no prompt": _Station("decode", _in("decode", "transferring"), legs="d"),
    "prompt, no reservation": _Station("prefill", _in("prefill", "handing_over"), legs="p"),
    "between chunks": _Station("prefill", _computed(8, False)),
    "mid-chunk": _Station("prefill", _computed(8, True)),
    "pages sent, none landed": _Station("prefill", _in("prefill", "handing_over"), plan=_never),
    "pages landed, no record": _Station(
        "prefill", _in("prefill", "handing_over"), plan=lambda n: Fault(delay=1e9 if n >= 4 else 0)
    ),
    "arrived": _Station("decode", _in("decode", "arrived"), before=2),
    "running": _Station("decode", lambda cluster, call: len(call.output) >= 3),
    "retracted": _Station("decode", _in("decode", "retracted"), before=1),
}


# If chunks are read in the turn that launches them a request is never mid-chunk, otherwise always.
WAYS = [
    (name, completion)
    for name in STATIONS
    for completion in (Immediate, Deferred)
    if (name, completion) not in (("mid-chunk", Immediate), ("between chunks", Deferred))
]


@pytest.mark.parametrize(
    ("way", "fencing", "ending"), combinations(WAYS, (False, True), ("abort", "deadline", "router lost"))
)
def test_the_end_at_a_station(way: tuple[str, type[Completion]], ending: str, fencing: bool) -> None:
    name, completion = way
    station = STATIONS[name]
    shape = Shape(
        page_size=4,
        chunk_tokens=8,
        prefill_pool=128 if name.startswith("prompt waits for pages") else 1024,
        decode_pool=160 if name != "retracted" else 96,
        reserved_tokens=4,
        max_running=2,
        max_transferring=3,
        prefill_batch=4,
        fencing=fencing,
        completion=completion,
    )
    with NodeCluster(shape) as cluster:
        others = _company(cluster, name, station)
        cluster.fabric.plan = station.plan
        call = cluster.submit(prompt_of(LONG, 77), 60, deadline=2.0, legs=station.legs, seed=3, **SAMPLED)
        cluster.run(until=lambda: station.reached(cluster, call), limit=1000)
        assert not call.over
        if ending == "abort":
            cluster.abort(call)
        elif ending == "deadline":
            cluster.clock.now += 3.0
        else:
            cluster.prefill.link.router_lost = cluster.decode.link.router_lost = True
            for each in (call, *others):
                each.aborted = True
        cluster.turn(3)
        for side in (cluster.prefill, cluster.decode):
            held = [r for r in side.node.queues if r.room == call.room and not r.ended]
            assert not held, f"{name}: the request goes on"
        cluster.fabric.unstick()
        cluster.clock.now += 2e9  # delayed writes land now; deadlines of the others are far away
        cluster.run(limit=3000)
        if ending == "deadline":
            assert call.error is not None
            assert call.error.code == "deadline_exceeded"
        expect_reference(*(each for each in others if not each.aborted))
        cluster.settle()


def test_a_node_that_drops_its_router_reports_its_requests_as_failed() -> None:
    """A router that had only stalled still relies on the node: the request must not wait for its timeout."""
    with NodeCluster(Shape()) as cluster:
        call = cluster.submit(prompt_of(20, 5), 40)
        cluster.run(until=lambda: len(cluster.decode.node.queues.running) == 1)
        cluster.decode.link.router_lost = True
        cluster.decode.node.loop.turn()
        failed = [each for each in cluster.decode.link.taken() if isinstance(each, Failed)]
        assert [(each.room, each.code) for each in failed] == [(call.room, "node_lost")]
        call.aborted = True
        cluster.settle()


def _company(cluster: NodeCluster, name: str, station: _Station) -> list[Call]:
    """Submit requests that block others, so that the one under test stays at its station."""
    forever = 1e12
    if name.startswith("prompt waits for pages"):
        return [cluster.submit(prompt_of(26, n), 3, deadline=forever) for n in range(station.before)]
    if name == "reservation waits for pages":
        return [cluster.submit(prompt_of(LONG, n), 20, deadline=forever) for n in range(station.before)]
    if name == "arrived":
        calls = [cluster.submit(prompt_of(5, n), 30, deadline=forever) for n in range(station.before)]
        cluster.run(until=lambda: all(len(call.output) > 1 for call in calls))
        return calls
    if name == "retracted":
        calls = [cluster.submit(prompt_of(20), 70, deadline=forever)]
        cluster.run(until=lambda: len(calls[0].output) > 30)
        return calls
    return []
