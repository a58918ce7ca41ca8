"""Nodes find routers by EndpointSlices; an API server that fails, hangs or answers nonsense takes none away."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from common.discovery import slices
from common.discovery.places import router_places
from common.discovery.slices import SliceRouters
from common.errors import ConfigError
from common.kubernetes_api import ApiServer
from common.node_plan import RouterPlan
from common.observability.logs import Log
from tests.fakes.api_server import END, FakeApiServer, endpoint, event, running, slice_of
from tests.fakes.waiting import until

ADDRESS = "endpointslices://tandem-router:5600"
ONE, TWO, NINE = (f"tcp://10.0.0.{number}:5600" for number in (1, 2, 9))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SOONEST", 0.005)
    monkeypatch.setattr(slices, "LATEST", 0.01)


@pytest.fixture
def server() -> FakeApiServer:
    server = FakeApiServer()
    server.slices = [slice_of("a", endpoint("10.0.0.1"))]
    return server


def credentials(directory: Path, token: str = "first") -> Path:
    (directory / "token").write_text(token + "\n")
    (directory / "namespace").write_text("tandem")
    return directory


@contextmanager
def following(server: FakeApiServer, directory: Path, slots: int = 2) -> Iterator[SliceRouters]:
    with running(server) as url:
        api = ApiServer(url, credentials(directory))
        with closing(SliceRouters(ADDRESS, slots, api, Log("node"))) as routers:
            yield routers
        until(lambda: not any(each.name == "router-slices" for each in threading.enumerate()))


def test_a_watch_tells_of_routers_that_come_and_go(server: FakeApiServer, tmp_path: Path) -> None:
    with following(server, tmp_path, 3) as routers:
        one, two, three = routers.slots
        assert until(one.next) == ONE
        assert two.next() is None
        server.events.put(
            event("MODIFIED", slice_of("a", endpoint("10.0.0.1"), endpoint("10.0.0.2"), version=2))
        )
        assert until(two.next) == TWO
        server.events.put(event("DELETED", slice_of("a", version=3)))
        server.events.put(event("ADDED", slice_of("b", endpoint("fd00::9"), version=4, kind="IPv6")))
        assert until(three.next) == "tcp://[fd00::9]:5600"
        assert (server.lists, server.watches) == (1, ["1"])


def test_a_watch_goes_on_from_the_version_of_a_bookmark(server: FakeApiServer, tmp_path: Path) -> None:
    with following(server, tmp_path) as routers:
        assert until(routers.slots[0].next) == ONE
        server.events.put(event("BOOKMARK", {"metadata": {"resourceVersion": "70"}}))
        server.events.put(END)
        until(lambda: server.watches == ["1", "70"])
        assert server.lists == 1


@pytest.mark.parametrize("in_stream", [True, False])
def test_a_version_that_is_too_old_is_listed_again(
    server: FakeApiServer, tmp_path: Path, in_stream: bool
) -> None:
    with following(server, tmp_path) as routers:
        one, two = routers.slots
        assert until(one.next) == ONE
        server.slices = [slice_of("a", endpoint("10.0.0.1"), endpoint("10.0.0.9"))]
        server.version = 90
        if in_stream:
            server.events.put(event("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
        else:
            server.watch_status = 410
            server.events.put(END)
        assert until(two.next) == NINE
        server.watch_status = 200
        until(lambda: server.watches[-1] == "90")


def test_a_silent_stream_is_given_up(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "WATCH_SECONDS", 1)
    monkeypatch.setattr(slices, "OVERDUE_SECONDS", -0.9)
    with following(server, tmp_path) as routers:
        assert until(routers.slots[0].next) == ONE
        server.slices.append(slice_of("b", endpoint("10.0.0.2")))
        assert until(routers.slots[1].next) == TWO
        assert server.lists > 1


def test_the_token_is_read_again(server: FakeApiServer, tmp_path: Path) -> None:
    with following(server, tmp_path) as routers:
        one, two = routers.slots
        assert until(one.next) == ONE
        server.token = "second"
        server.events.put(END)
        until(lambda: server.refused > 1)
        assert one.next() == ONE
        server.slices.append(slice_of("b", endpoint("10.0.0.2")))
        credentials(tmp_path, "second")
        assert until(two.next) == TWO


def test_a_limit_of_threads_does_not_end_the_search(server: FakeApiServer, tmp_path: Path) -> None:
    """Addresses of names are looked up in threads, of which there may be too many for a while."""

    class Busy(ApiServer):
        failed = False

        def tls(self) -> ssl.SSLContext | bool:
            if not self.failed:
                self.failed = True
                raise RuntimeError("can't start new thread")
            return super().tls()

    with running(server) as url:
        api = Busy(url, credentials(tmp_path))
        with closing(SliceRouters(ADDRESS, 1, api, Log("node"))) as routers:
            assert until(routers.slots[0].next) == ONE
    assert api.failed


def test_one_pod_in_two_slices_is_one_router(server: FakeApiServer, tmp_path: Path) -> None:
    server.slices = [
        slice_of("a", endpoint("10.0.0.1", "pod-1"), endpoint("10.0.0.2")),
        slice_of("b", endpoint("10.0.0.1", "pod-1"), endpoint("10.0.0.2")),
        slice_of("c", endpoint("fd00::1", "pod-1"), kind="IPv6"),
        slice_of("d", endpoint("router.example"), kind="FQDN"),
    ]
    with following(server, tmp_path, 4) as routers:
        assert until(routers.slots[0].next) == ONE
        assert [each.next() for each in routers.slots[1:]] == [TWO, None, None]


def test_a_router_that_drains_gets_no_new_links(server: FakeApiServer, tmp_path: Path) -> None:
    """With publishNotReadyAddresses a terminating endpoint is `ready`, and a starting one counts as a router."""
    draining = endpoint("10.0.0.1", "pod-1", ready=True, serving=True, terminating=True)
    server.slices = [
        slice_of("a", draining, endpoint("10.0.0.2", "pod-2", ready=False, serving=False, terminating=False)),
        slice_of("b", endpoint("10.0.0.1", "pod-1", ready=True, serving=True, terminating=False)),
    ]
    with following(server, tmp_path) as routers:
        assert until(routers.slots[0].next) == TWO
        assert routers.slots[1].next() is None


@pytest.mark.parametrize("body", [b'{"metadata": {}, "items": [' + b" " * 3000, b"[]", b"\xff"])
def test_a_list_that_is_huge_or_no_list_takes_no_router_away(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(slices, "MAX_BYTES", 2000)
    with following(server, tmp_path) as routers:
        one, two = routers.slots
        assert until(one.next) == ONE
        server.body = body
        # An event that is too long, without an end.
        server.events.put(b'{"type": "' + b"x" * 3000)
        lists = server.lists
        until(lambda: server.lists > lists + 1)
        assert one.next() == ONE
        server.body = None
        server.slices.append(slice_of("b", endpoint("10.0.0.2")))
        assert until(two.next) == TWO


def test_more_slices_and_routers_than_are_used(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "MAX_SLICES", 2)
    monkeypatch.setattr(slices, "MAX_ADDRESSES", 3)
    server.slices = [
        slice_of(name, endpoint(f"10.0.{at}.1"), endpoint(f"10.0.{at}.2")) for at, name in enumerate("abc")
    ]
    with following(server, tmp_path, 5) as routers:
        assert until(routers.slots[0].next)
        server.events.put(event("ADDED", slice_of("d", endpoint("10.0.0.9"), version=2)))
        server.events.put(END)
        until(lambda: "2" in server.watches)
        found = {each.next() for each in routers.slots} - {None}
        assert found == {"tcp://10.0.0.1:5600", "tcp://10.0.0.2:5600", "tcp://10.0.1.1:5600"}


def test_a_node_outside_of_a_pod_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    plan = RouterPlan(addresses=(ADDRESS,), heartbeat_interval=1.0, timeout=2.0)
    with pytest.raises(ConfigError, match=r"router\.control_address: this is not a pod"):
        router_places(plan, Log("node"))
    with pytest.raises(ConfigError, match="the pod needs a service account token"):
        SliceRouters(ADDRESS, 1, ApiServer("http://127.0.0.1:1", tmp_path), Log("node"))
