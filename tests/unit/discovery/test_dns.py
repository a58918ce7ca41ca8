"""Nodes find routers by the addresses of a name; a DNS server that fails takes none away."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from common.discovery import dns
from common.discovery.dns import DnsRouters
from common.discovery.places import router_places
from common.discovery.slots import NONE_FOUND
from common.node_plan import RouterPlan
from common.observability.logs import Log
from tests.fakes.waiting import PATIENCE, until

LISTED = ("tcp://10.0.0.1:5600", "tcp://10.0.0.2:5600")


class Server:
    """A DNS server that the test scripts."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.failing: OSError | None = None
        self.asked = 0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, name: str) -> list[str]:
        assert name == "tandem-router"
        self.asked += 1
        assert self.open.wait(PATIENCE)
        if self.failing is not None:
            raise self.failing
        return self.addresses


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "SOONEST", 0.005)
    monkeypatch.setattr(dns, "INTERVAL", 0.01)


def test_each_address_of_the_name_gets_a_link() -> None:
    with closing(DnsRouters("dns://tandem-router:5600", 3, Server("10.0.0.1", "fd00::2"))) as routers:
        one, two, three = routers.slots
        assert until(one.next) == "tcp://10.0.0.1:5600"
        assert (two.next(), three.next()) == ("tcp://[fd00::2]:5600", None)
        assert three.problem == "each router that is found has another link of this node"
        assert one.text == "dns://tandem-router:5600"


def test_a_router_that_starts_later_is_found() -> None:
    server = Server("10.0.0.1")
    with closing(DnsRouters("dns://tandem-router:5600", 2, server)) as routers:
        one, two = routers.slots
        assert until(one.next) == "tcp://10.0.0.1:5600"
        server.addresses = ["10.0.0.9", "10.0.0.1"]
        assert until(lambda: (two.ask(), two.next())[1]) == "tcp://10.0.0.9:5600"


@pytest.mark.parametrize("failure", [OSError("no answer"), None])
def test_a_failing_server_takes_no_router_away(failure: OSError | None) -> None:
    server = Server("10.0.0.1", "10.0.0.2")
    with closing(DnsRouters("dns://tandem-router:5600", 2, server)) as routers:
        one, two = routers.slots
        assert until(one.next) == "tcp://10.0.0.1:5600"
        server.failing, server.addresses = failure, []
        asked = server.asked
        until(lambda: server.asked > asked + 2)
        assert two.next() == "tcp://10.0.0.2:5600"


def test_why_no_router_is_found() -> None:
    server = Server()
    with closing(DnsRouters("dns://tandem-router:5600", 1, server)) as routers:
        (slot,) = routers.slots
        assert slot.problem == NONE_FOUND
        server.failing = OSError("no answer")
        until(lambda: slot.problem == "the addresses of tandem-router are not found: no answer")


def test_a_server_that_does_not_answer_holds_nobody_up() -> None:
    server = Server("10.0.0.1")
    server.open.clear()
    with closing(DnsRouters("dns://tandem-router:5600", 1, server)) as routers:
        (slot,) = routers.slots
        until(lambda: server.asked)
        slot.ask()
        assert slot.next() is None
        assert server.asked == 1
        server.open.set()


def test_listed_routers_need_no_source() -> None:
    places = router_places(RouterPlan(addresses=LISTED, heartbeat_interval=1.0, timeout=2.0), Log("node"))
    assert (places.hosts, places.sources) == (LISTED, ())
    places.close()
