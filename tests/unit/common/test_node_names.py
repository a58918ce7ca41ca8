"""Entries of a cluster file by which nodes join under names that it does not list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.config import Resolved, load_cluster
from common.config.node_entries import own_host
from common.config.resolve_node import node_plan
from common.config.run_directory import peer_address
from common.errors import ConfigError
from common.ipc.from_config import admitted_names, all_names
from common.node_names import NodeNames, is_pattern, matches, overlap
from tests.cluster.harness import MODEL

JOINING: dict[str, Any] = {
    "prefill": {"nodes": [{"name": "prefill-*", "count": 4, "peer_address": "tcp://own:5601"}]},
    "decode": {"nodes": [{"name": "decode-0"}, {"name": "decode-*", "count": 2, "host": "own"}]},
    "security": {"keys": "keys"},
    "transfer": {"transport": "tcp"},
}


def load(tmp_path: Path, environ: dict[str, str] | None = None, **sections: Any) -> Resolved:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": str(MODEL)}, **JOINING, **sections}))
    return load_cluster(file, environ={} if environ is None else environ)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("decode-0", "decode-0"),
        ("decode-1", "decode-*"),
        ("decode-6d4cf56db6-x2k9p", "decode-*"),
        ("decode-", None),
        ("decode-*", None),
        ("decode-A", None),
        ("decode-1/x", None),
        ("decode-" + "1" * 60, None),
        ("prefill-0", None),
        ("", None),
    ],
)
def test_a_name_belongs_to_one_entry(name: str, entry: str | None) -> None:
    names = NodeNames.of(["decode-0", "decode-*"])
    assert names.entry(name) == entry
    assert names.key_of(name) == (entry or name)
    assert NodeNames.of([]).entry(name) is None


@given(
    st.text("ab-", min_size=1, max_size=3), st.text("ab-", min_size=1, max_size=3), st.text("ab-", max_size=4)
)
def test_patterns_without_overlap_share_no_name(one: str, other: str, name: str) -> None:
    if matches(f"{one}*", name) and matches(f"{other}*", name):
        assert overlap(f"{one}*", f"{other}*")


def test_a_joining_node_has_its_entry_under_its_own_name(tmp_path: Path) -> None:
    cluster = load(tmp_path).cluster
    joined = cluster.decode_node("decode-7")
    assert (joined.name, joined.count, joined.host) == ("decode-7", None, "own")
    assert cluster.decode_node("decode-0").host == "127.0.0.1"
    with pytest.raises(ConfigError, match="no node is called 'decode-\\*'"):
        cluster.decode_node("decode-*")
    assert all_names(cluster) == ["router", "prefill-*", "decode-0", "decode-*"]
    assert admitted_names(cluster, "prefill-3") == {"decode-0", "decode-*"}
    assert admitted_names(cluster, "decode-3") == frozenset()


def test_the_own_address_comes_from_the_environment(tmp_path: Path) -> None:
    resolved = load(tmp_path, {"TANDEM_PROCESS_ADDRESS": "10.1.2.3"})
    assert own_host(resolved.cluster, "own", "x") == "10.1.2.3"
    assert peer_address(resolved, "prefill-2") == "tcp://10.1.2.3:5601"
    assert peer_address(resolved, "prefill-2", rank=1) == "tcp://10.1.2.3:0"
    six = load(tmp_path, {"TANDEM_PROCESS_ADDRESS": "fd00::7"})
    assert peer_address(six, "prefill-2") == "tcp://[fd00::7]:5601"
    with pytest.raises(ConfigError, match=r"prefill-2\]\.peer_address: own stands for process\.address"):
        peer_address(load(tmp_path), "prefill-2")


@pytest.mark.parametrize("address", ["tandem-0", "0.0.0.0", "::", "224.0.0.1", "10.0.0.7:5601"])
def test_an_own_address_is_one_that_others_can_use(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"TANDEM_PROCESS_ADDRESS": address})
    assert caught.value.path == "process.address"


def test_an_own_address_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    nodes = {"prefill": {"nodes": [{"name": "p"}]}, "decode": {"nodes": [{"name": "d"}]}}
    with pytest.raises(ConfigError, match=r"process\.address: .*no node's address has the host own"):
        load(tmp_path, {"TANDEM_PROCESS_ADDRESS": "10.0.0.1"}, **nodes, security={}, transfer={})


@pytest.mark.parametrize(
    ("prefill", "decode", "path", "words"),
    [
        ([{"name": "p"}], [{"name": "d-*"}], "decode.nodes[0].count", "as in count: 16"),
        ([{"name": "p", "count": 2}], [{"name": "d"}], "prefill.nodes[0].count", "p is one node"),
        ([{"name": "n-*", "count": 1}], [{"name": "n-*", "count": 1}], "decode.nodes[0].name", "is also"),
        ([{"name": "n-*", "count": 1}], [{"name": "n-d*", "count": 1}], "decode.nodes[0].name", "same names"),
        ([{"name": "r*", "count": 1}], [{"name": "d"}], "prefill.nodes[0].name", "looks like a router"),
        ([{"name": "router-*", "count": 1}], [{"name": "d"}], "prefill.nodes[0].name", "looks like a router"),
        ([{"name": "*", "count": 1}], [{"name": "d"}], "prefill.nodes[0].name", "Expected `str`"),
        ([{"name": "p-*-x", "count": 1}], [{"name": "d"}], "prefill.nodes[0].name", "Expected `str`"),
        ([{"name": "p-*", "count": 0}], [{"name": "d"}], "prefill.nodes[0].count", ">= 1"),
    ],
)
def test_patterns_that_do_not_say_who_is_who_are_refused(
    tmp_path: Path, prefill: list[dict[str, Any]], decode: list[dict[str, Any]], path: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, prefill={"nodes": prefill}, decode={"nodes": decode}, security={}, transfer={})
    assert caught.value.path.replace("[]", "[0]") == path


def test_a_joining_node_has_its_gpus_for_itself(tmp_path: Path) -> None:
    cluster = load(tmp_path).cluster
    joined = node_plan(cluster, "decode", "decode-5", MODEL)
    listed = node_plan(cluster, "decode", "decode-0", MODEL)
    assert (joined.name, len(joined.shares), len(listed.shares)) == ("decode-5", 1, 1)
    assert not is_pattern(joined.name)
