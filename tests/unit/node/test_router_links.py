"""The links of a node to several routers: what each router is told about the requests of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from common.messages import prefill_inbox
from common.messages.identity import NodeCounters, NodeLoad, OtherRouters
from common.messages.node_inbox import Abort
from common.messages.router_inbox import Goodbye
from common.node.router_links import COUNT_INTERVAL, TEND_INTERVAL, Held
from tests.fakes.clock import Clock
from tests.fakes.fake_link import FakeLink, FakeLinks


class Rig:
    def __init__(self, routers: int) -> None:
        self.clock = Clock()
        self.context = zmq.Context[zmq.Socket[bytes]]()
        codec: Any = prefill_inbox.codec
        self.each = [FakeLink(self.context, codec) for _ in range(routers)]
        self.links = FakeLinks(self.each, self.clock)

    def publish(self, *held: Held) -> None:
        self.links.publish("up", NodeLoad(queued=len(held)), NodeCounters(), held)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(getattr(request, "param", 2))
    yield made
    made.links.close()
    made.context.term()


def test_each_router_learns_what_the_others_have_here(rig: Rig) -> None:
    a, b = rig.each
    rig.publish((a, 10), (a, 20), (b, 3))
    assert a.others == OtherRouters(routers=1, requests=1, tokens=3)
    assert b.others == OtherRouters(routers=1, requests=2, tokens=30)
    b.registered = False
    rig.clock.now += COUNT_INTERVAL
    rig.publish((a, 20))
    assert a.others == OtherRouters()
    assert b.others == OtherRouters(routers=1, requests=1, tokens=20)


def test_requests_are_counted_from_time_to_time_and_loads_always(rig: Rig) -> None:
    a, b = rig.each
    rig.publish((a, 10))
    rig.publish((a, 10), (a, 10))
    assert (b.others, b.load.queued) == (OtherRouters(routers=1, requests=1, tokens=10), 2)
    rig.clock.now += COUNT_INTERVAL
    rig.publish((a, 10), (a, 10))
    assert b.others == OtherRouters(routers=1, requests=2, tokens=20)


@pytest.mark.parametrize("rig", [1], indirect=True)
def test_the_only_router_is_told_of_no_others_and_nothing_is_counted(rig: Rig) -> None:
    def held() -> Iterator[Held]:
        raise AssertionError("requests were counted")
        yield

    rig.links.publish("up", NodeLoad(), NodeCounters(), held())
    assert rig.each[0].others is None


def test_messages_come_with_their_router_and_idle_links_are_read_now_and_then(rig: Rig) -> None:
    a, b = rig.each
    rig.links.drain()
    abort = Abort(room=1, reason="gone")
    b.deliver(abort)
    assert rig.links.drain() == [(b, abort)]
    a.hidden = True  # its session has something to do that its socket does not show
    a.deliver(abort)
    assert rig.links.drain() == []
    rig.clock.now += 2 * TEND_INTERVAL
    assert rig.links.drain() == [(a, abort)]


def test_a_lost_router_is_reported_once_and_the_others_stay(rig: Rig) -> None:
    a, b = rig.each
    a.router_lost = True
    assert rig.links.lost() == [a]
    assert rig.links.registered == [b]
    assert rig.links.lost() == []


def test_a_goodbye_goes_to_all_routers(rig: Rig) -> None:
    rig.links.send_all(Goodbye(incarnation="n"))
    assert [link.taken() for link in rig.each] == [[Goodbye(incarnation="n")]] * 2
