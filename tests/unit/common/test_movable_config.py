"""Movable nodes in a cluster file: what they need, and what their halves get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from common.config import Resolved, load_cluster
from common.config.kv_events import kv_events_plan
from common.config.resolve_node import node_plan
from common.errors import ConfigError
from common.ipc.from_config import admitted_names, all_names

MODEL = Path(__file__).parents[3] / "deploy" / "tiny_models" / "tiny-target"
PAIR: dict[str, Any] = {
    "prefill": {"nodes": [{"name": "prefill-0"}, {"name": "flex-0"}]},
    "decode": {"nodes": [{"name": "decode-0"}, {"name": "flex-0"}]},
    "movable": {"nodes": [{"name": "flex-0"}]},
}


def load(directory: Path, **sections: Any) -> Resolved:
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": str(MODEL)}, **PAIR, **sections}))
    return load_cluster(file, environ={})


def test_a_movable_node_has_one_key_and_one_first_role(tmp_path: Path) -> None:
    cluster = load(tmp_path).cluster
    assert all_names(cluster) == ["router", "prefill-0", "flex-0", "decode-0"]
    assert admitted_names(cluster, "flex-0") == {"decode-0", "flex-0"}
    assert cluster.starts_as("flex-0", "decode")
    assert not cluster.starts_as("flex-0", "prefill")
    assert cluster.starts_as("prefill-0", "prefill")


def test_either_half_has_a_pool_and_one_has_the_weights(tmp_path: Path) -> None:
    section = {"nodes": [{"name": "flex-0"}], "prefill_pool_tokens": 512}
    resolved = load(tmp_path, movable=section)
    halves = [
        node_plan(resolved.cluster, role, "flex-0", resolved.model_path) for role in ("prefill", "decode")
    ]
    assert [each.pool.tokens for each in halves] == [512, resolved.cluster.decode.CPU_POOL_TOKENS]
    assert [each.pool.has_weights for each in halves] == [True, False]
    assert [each.pool.key for each in halves] == ["movable.prefill_pool_tokens", "movable.decode_pool_tokens"]
    assert [len(each.shares) for each in halves] == [4, 4]
    pure = node_plan(resolved.cluster, "decode", "decode-0", resolved.model_path)
    assert (pure.pool.has_weights, pure.pool.key) == (True, "decode.pool_tokens")


def test_each_half_publishes_events_of_its_own(tmp_path: Path) -> None:
    cluster = load(tmp_path, kv_events={"enabled": True}).cluster
    plans = [kv_events_plan(cluster, role, "flex-0", "m") for role in ("prefill", "decode")]
    assert [each and (each.address, each.topic) for each in plans] == [
        ("tcp://127.0.0.1:5558", "kv@flex-0.prefill@m"),
        ("tcp://127.0.0.1:5560", "kv@flex-0.decode@m"),
    ]


def test_shares_of_a_gpu(tmp_path: Path) -> None:
    on_gpu = {
        "prefill": {"nodes": [{"name": "flex-0", "device": "cuda:0"}]},
        "decode": {
            "nodes": [{"name": "decode-0", "device": "cuda:1"}, {"name": "flex-0", "device": "cuda:0"}]
        },
        "movable": {"nodes": [{"name": "flex-0", "role": "prefill"}], "decode_memory_fraction": 0.3},
    }
    resolved = load(tmp_path, **on_gpu)
    for role, fraction in (("prefill", 0.45), ("decode", 0.3)):
        pool = node_plan(resolved.cluster, role, "flex-0", resolved.model_path).pool
        assert (pool.tokens, pool.fraction, pool.key) == (None, fraction, f"movable.{role}_memory_fraction")


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"movable": {}}, "decode.nodes[1].name", "is named in movable.nodes, too"),
        ({"decode": {"nodes": [{"name": "decode-0"}]}}, "movable.nodes[0].name", "no entry in decode.nodes"),
        ({"prefill": {"nodes": [{"name": "prefill-0"}]}}, "movable.nodes[0].name", "no entry in prefill.nodes"),
        ({"movable": {"nodes": [{"name": "flex-0"}] * 2}}, "movable.nodes[1].name", "named twice"),
        ({"movable": {"nodes": [{"name": "flex-*"}]}}, "movable.nodes[0].name", "name every movable node itself"),
        (
            {"decode": {"nodes": [{"name": "flex-0", "device": "cuda:0"}]}},
            "movable.nodes[0].name",
            "on cpu in prefill.nodes and on cuda:0 in decode.nodes",
        ),
        (
            {
                role: {"nodes": [{"name": "flex-0", "tensor_parallel": 2}]}
                for role in ("prefill", "decode")
            },
            "movable.nodes[0].name",
            "has 2 ranks, and a movable node has one",
        ),
        (
            {
                "prefill": {"nodes": [{"name": "flex-0", "peer_address": "tcp://10.0.0.1:7"}]},
                "decode": {"nodes": [{"name": "flex-0", "host": "10.0.0.2"}]},
            },
            "movable.nodes[0].name",
            "addresses of two hosts",
        ),
        (
            {
                **{role: {"nodes": [{"name": "flex-0", "device": "cuda:0"}]} for role in ("prefill", "decode")},
                "movable": {
                    "nodes": [{"name": "flex-0"}],
                    "decode_pool_tokens": 512,
                    "decode_memory_fraction": 0.3,
                },
            },
            "movable.decode_memory_fraction",
            "given as a number of tokens",
        ),
        (
            {"router": {"local_prefill": 4096}},
            "router.local_prefill",
            "more than one forward computes (prefill.chunk_tokens, 2048)",
        ),
        (
            {
                "router": {"local_prefill": 64},
                "transfer": {"transport": "nixl"},
                "security": {"isolated_network": True},
            },
            "router.local_prefill",
            "transfer.transport nixl does not move pages within a process",
        ),
        (
            {"movable": {"nodes": [{"name": "flex-0"}], "decode_memory_fraction": 0.2}},
            "movable.decode_memory_fraction",
            "these nodes are on the CPU",
        ),
        (
            {"movable": {"nodes": [{"name": "flex-0"}], "decode_pool_tokens": 64}, "model": {"max_model_len": 128}},
            "movable.decode_pool_tokens",
            "hold no request of model.max_model_len, 128",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], path: str, words: str) -> None:
    if "model" in change:
        change["model"] |= {"path": str(MODEL)}
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, **change)
    assert refused.value.path == path
    assert words in str(refused.value)


def test_pools_without_a_movable_node_are_refused(tmp_path: Path) -> None:
    nodes = {role: {"nodes": [{"name": f"{role}-0"}]} for role in ("prefill", "decode")}
    with pytest.raises(ConfigError, match=r"movable.prefill_pool_tokens: 99 would have no effect"):
        load(tmp_path, **nodes, movable={"prefill_pool_tokens": 99})
    with pytest.raises(ConfigError, match=r"router.local_prefill: 64 would have no effect"):
        load(tmp_path, **nodes, movable={}, router={"local_prefill": 64})
    assert msgspec.to_builtins(load(tmp_path, **nodes, movable={}).cluster.movable)["nodes"] == ()
