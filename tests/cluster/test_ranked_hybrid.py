"""The tiny model of Qwen3.5's form as the file for four GPUs serves it, on CPUs: FP8, two ranks per node, MTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from deploy.eval_cli import EvalSettings, evaluate
from tests.cluster.check_families import absolute
from tests.cluster.harness import ROOT, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores

FILE = ROOT / "deploy" / "clusters" / "h200-x4-qwen3.5-35b-a3b.yaml"
# What a CPU has instead, and fewer graphs, for time.
ON_CPUS = {
    "model": {"dtype": "auto"},
    "prefill": {"nodes": [{"name": "prefill-0", "devices": ["cpu", "cpu"]}], "chunk_tokens": 64},
    "decode": {"nodes": [{"name": "decode-0", "devices": ["cpu", "cpu"]}], "max_running": 4},
    "speculation": {"forced_tokens": False},
}


async def test_answers_are_right_drafts_are_accepted_and_every_forward_is_a_replay(tmp_path: Path) -> None:
    """The assertions of row B11: the score of the answers, and the accept length in /server_info."""
    config = absolute(FILE)
    for section, values in ON_CPUS.items():
        config[section] |= values
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        with Progress(disable=True) as progress:
            report = await evaluate(
                EvalSettings(cluster.url, count=8, seed=7, concurrency=4, timeout=600.0), progress
            )
        await client.wait_idle()
        info = await client.info()
    assert report.errors == 0, report.first_error
    assert report.score >= 0.9
    (state,) = info["internal_states"]
    assert state["avg_spec_accept_length"] > 1.5, state
    nodes = {node["role"]: node for node in info["nodes"]}
    assert [len(node["ranks"]) for node in nodes.values()] == [2, 2]
    assert {node["config"]["weights"].split()[0] for node in nodes.values()} == {"fp8"}
    graphs = {role: node["counters"]["graphs"] for role, node in nodes.items()}
    forwards = {
        (role, row["phase"], row["model"]): row["replays"] for role, rows in graphs.items() for row in rows
    }
    assert not any(row["fallbacks"] for rows in graphs.values() for row in rows), graphs
    assert all(forwards.values())
    assert set(forwards) == {
        ("prefill", "prefill", "target"),
        ("prefill", "prefill", "draft"),
        ("decode", "draft", "draft"),
        ("decode", "verify", "target"),
        ("decode", "draft_extend", "draft"),
    }
    # No round ran without its graphs.
    assert len({count for (role, *_), count in forwards.items() if role == "decode"}) == 1
    assert forwards["decode", "verify", "target"] == nodes["decode"]["counters"]["steps"]
