"""A served load runs under graphs, on the tape: both nodes count it, and tokens equal those of eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.graph_metrics import graph_series, replay_share
from tests.cluster.harness import MODEL, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores

GRAPHS: dict[str, Any] = {
    "prefill": {"enforce_graphs": True},
    "decode": {"graphs": "full"},
    "process": {"poison_graphs": True},
}

HIDDEN = {  # hidden states that the target's graphs return, then the draft's
    "eagle3": ["FULL", "LAST"],
    "mtp": ["FULL", "LAST", "LAST", "LAST"],
    "standalone": ["NULL", "NULL"],
}


async def test_a_served_load_replays(prompts: list[list[int]], reference: Reference, tmp_path: Path) -> None:
    """With default buckets at least 95 % of prefills and of decode steps replay: the decisive test of graphs.

    Row B2: prompts run under graphs on a CPU because the config enforces it. Padding is poisoned, which changes no
    token.
    """
    load = prompts[36::4]
    async with RunningCluster(tmp_path, config=GRAPHS) as cluster, Client(cluster.url) as client:
        greedy = await client.complete_all(load, 4, 8)
        for prompt, answer in zip(load, greedy, strict=True):
            assert answer.tokens == reference(prompt, 8, answer.tokens)
        await client.complete_all(load[:6], 3, 8, temperature=0.8, top_p=0.9, seed=3)
        await client.complete_all(load[:4], 2, 8, temperature=0.8, seed=3)
        await client.wait_idle()
        async with client.session.get("/metrics") as response:
            text = await response.text()
        nodes = {node["role"]: node for node in (await client.info())["nodes"]}
    why = {"prefill": ["enforced", "padding is poisoned"], "decode": ["padding is poisoned"]}
    for role, phase in (("prefill", "prefill"), ("decode", "decode")):
        series = graph_series(text, role)
        assert replay_share(series, phase, "target") >= 0.95, series
        # The decode node also has a graph that verifies tokens forced by grammars, of which this load has none.
        totals, told = nodes[role]["counters"]["graphs"][0], nodes[role]["graphs"][0]
        assert (totals["phase"], totals["model"]) == (phase, "target")
        assert totals["replays"] == series["tandem_graph_replays_total", phase, "target", ""] > 4
        assert (
            0
            <= totals["unused"]
            < totals["captured"]
            == series["tandem_graphs_captured", phase, "target", ""]
        )
        assert (told["phase"], told["captured"], told["failed"]) == (phase, totals["captured"], {})
        assert told["reasons"] == why[role]


@pytest.mark.parametrize(
    ("algorithm", "graphs"),
    [("eagle3", "breakable"), ("mtp", "breakable"), ("standalone", "breakable"), ("eagle3", "piecewise")],
)
async def test_target_and_draft_prefill_replay(
    algorithm: str, graphs: str, prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    """Rows A2, B6, B7, B: no target forward runs eagerly for its hidden states, and no draft forward at all.

    The draft's graphs are breakable even if the target's are piecewise, and the graph table says so.
    """
    speculation = {
        "algorithm": algorithm,
        "draft_model_path": str(MODEL.parent / f"tiny-{algorithm}"),
        "steps": 3,
    }
    config = {"prefill": {"graphs": graphs, "chunk_tokens": 256}, "speculation": speculation}
    load = prompts[46:84:3]
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(load, 3, 8)
        for prompt, answer in zip(load, answers, strict=True):
            assert answer.tokens == reference(prompt, 8, answer.tokens)
        await client.wait_idle()
        async with client.session.get("/metrics") as response:
            series = graph_series(await response.text(), "prefill")
        (node,) = [node for node in (await client.info())["nodes"] if node["role"] == "prefill"]
    drafts = ["draft-0", "draft-1", "draft-2"] if algorithm == "mtp" else ["draft"]
    for model in ("target", *drafts):
        assert replay_share(series, "prefill", model) >= 0.95, series
        assert series["tandem_graph_replays_total", "prefill", model, ""] > 4
    told = node["graphs"]
    assert [(row["model"], row["backend"]) for row in told] == [
        ("target", graphs),
        *((model, "breakable") for model in drafts),
    ]
    assert [row["hidden_mode"] for row in told] == HIDDEN[algorithm]
    assert all(row["captured"] == len(row["shapes"]) > 4 and not row["failed"] for row in told)
    assert (told[0]["compiler"], told[0]["compile_seconds"] > 0) == (
        ("eager", True) if graphs == "piecewise" else ("", False)
    )
    assert {row["compiler"] for row in told[1:]} == {""}
