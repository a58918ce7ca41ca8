"""The section kv_events: off by default, on loopback, and elsewhere only with security.isolated_network."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Resolved, load_cluster
from common.config.kv_events import kv_events_plan
from common.errors import ConfigError

ON = "kv_events.enabled=true"


def load(directory: Path, *overrides: str) -> Resolved:
    file = directory / "c.yaml"
    file.write_text(
        "model: {path: x}\n"
        "prefill: {nodes: [{name: p-0}, {name: 'q-*', count: 2}]}\n"
        "decode: {nodes: [{name: d-0}]}\n"
        f"process: {{run_dir: {directory}/run}}\n"
    )
    return load_cluster(file, overrides, environ={})


def test_nothing_is_published_by_default(tmp_path: Path) -> None:
    assert kv_events_plan(load(tmp_path).cluster, "prefill", "p-0", "m") is None


def test_each_node_has_its_own_ports_on_loopback(tmp_path: Path) -> None:
    cluster = load(tmp_path, ON, "router.placement.block_tokens=32").cluster
    plans = {
        name: kv_events_plan(cluster, role, name, "m")
        for role, name in (("prefill", "p-0"), ("prefill", "q-7"), ("decode", "d-0"))
    }
    assert {
        name: plan and (plan.address, plan.replay_address, plan.topic) for name, plan in plans.items()
    } == {
        "p-0": ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5757", "kv@p-0@m"),
        "q-7": ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5758", "kv@q-7@m"),
        "d-0": ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5759", "kv@d-0@m"),
    }
    assert {plan.block_tokens for plan in plans.values() if plan} == {32}


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        ((ON, "kv_events.host=0.0.0.0"), "kv_events.host", "security.isolated_network: true"),
        ((ON, "kv_events.host=own", "process.address=10.0.0.7"), "kv_events.host", "can be reached"),
        ((ON, "kv_events.first_replay_port=5558"), "kv_events.first_replay_port", "less than 3"),
        ((ON, "kv_events.first_port=65534"), "kv_events.first_port", "exceed 65535"),
        (
            ("kv_events.first_port=5000",),
            "kv_events.first_port",
            "would have no effect: kv_events.enabled is false",
        ),
        (
            ("router.placement.decode=cache_events",),
            "router.placement.decode",
            "kv_events.enabled is false: set it to true, or write cache_aware",
        ),
        ((ON, "kv_events.first_port=0"), "kv_events.first_port", ">= 1"),
        (
            (ON, "prefill.prefix_cache=false", "decode.prefix_cache=false"),
            "kv_events.enabled",
            "no node has a prefix cache",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: tuple[str, ...], path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, *overrides)
    assert caught.value.path == path


def test_an_isolated_network_permits_other_addresses(tmp_path: Path) -> None:
    isolated = "security.isolated_network=true"
    cluster = load(tmp_path, ON, isolated, "kv_events.host=own", "process.address=fd00::7").cluster
    plan = kv_events_plan(cluster, "decode", "d-0", "m")
    assert plan is not None
    assert plan.address == "tcp://[fd00::7]:5559"


def test_the_blocks_of_events_may_be_set_whatever_the_policies(tmp_path: Path) -> None:
    plain = "router.placement.prefill=round_robin", "router.placement.decode=round_robin"
    load(tmp_path, ON, *plain, "router.placement.block_tokens=32")
    with pytest.raises(ConfigError, match="only the policies cache_aware and cache_events read it"):
        load(tmp_path, *plain, "router.placement.block_tokens=32")
