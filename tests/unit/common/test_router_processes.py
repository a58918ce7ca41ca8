"""Names, numbers and addresses of several router processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.router_processes import (
    check_routers,
    derived_addresses,
    names_of,
    names_router,
    router_process,
)
from common.config.schema import Cluster, Model, RouterSection
from common.errors import ConfigError

RUN = Path("/run/c")


def cluster(**router: object) -> Cluster:
    return Cluster(model=Model(path="m"), router=RouterSection(**router))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "processes", "addresses"),
    [
        ("auto", 1, ["ipc:///run/c/router.sock"]),
        ("auto", 3, [f"ipc:///run/c/router{tail}.sock" for tail in ("", ".1", ".2")]),
        ("ipc:///a/b", 2, ["ipc:///a/b", "ipc:///a/b.1"]),
        ("tcp://[::1]:7100", 2, ["tcp://[::1]:7100", "tcp://[::1]:7101"]),
        (
            ("tcp://a:7100", "tcp://b:7100"),
            2,
            [f"tcp://{host}:{port}" for host in "ab" for port in (7100, 7101)],
        ),
    ],
)
def test_every_process_has_an_address(
    address: str | tuple[str, ...], processes: int, addresses: list[str]
) -> None:
    section = RouterSection(control_address=address, processes=processes)
    check_routers(section)
    assert derived_addresses(section, RUN) == addresses


def test_processes_are_numbered_over_all_hosts() -> None:
    shape = cluster(control_address=("tcp://a:7100", "tcp://b:7100"), processes=3)
    assert names_of(shape) == ["router", "router.1", "router.2", "router.3", "router.4", "router.5"]
    assert all(map(names_router, names_of(shape)))
    assert not names_router("router-1")
    assert router_process(shape, 0).host_peers == (1, 2)
    assert (router_process(shape, 4).name, router_process(shape, 4).host_peers) == ("router.4", (3, 5))
    assert router_process(cluster(), 0).host_peers == ()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_number_that_no_process_has_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match=r"^router\.processes: there is no router process .* 0 to 1"):
        router_process(cluster(processes=2), index)


@pytest.mark.parametrize(
    ("router", "says"),
    [
        ({"control_address": ("tcp://a:7100", "tcp://a:7101"), "processes": 2}, "would have one address"),
        ({"control_address": ("ipc:///a", "ipc:///b")}, "of the form tcp://"),
        ({"control_address": "tcp://a:65535", "processes": 2}, "as many ports"),
        ({"control_address": tuple(f"tcp://h{n}:1" for n in range(9)), "processes": 8}, "at most 64"),
        ({"port": 0, "processes": 2}, "share one port"),
    ],
)
def test_processes_that_cannot_have_addresses_are_refused(router: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_routers(cluster(**router).router)
