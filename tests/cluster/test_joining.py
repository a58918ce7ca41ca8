"""Real nodes that no cluster file lists join by the pattern of their names and its key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.harness import RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)

CONFIG = {
    "prefill": {"nodes": [{"name": "prefill-*", "count": 2, "peer_address": "tcp://own:0"}]},
    "decode": {"nodes": [{"name": "decode-*", "count": 1, "host": "own"}]},
    "transfer": {"transport": "tcp"},
    "process": {"address": "127.0.0.1"},
}


async def test_nodes_join_by_pattern_and_make_room_for_others(tmp_path: Path) -> None:
    """They authenticate each other although neither is in the file; one more than `count` is refused, and ends."""
    async with RunningCluster(tmp_path, 1, 1, CONFIG) as cluster:
        keys = {file.stem for file in (cluster.run_dir / "keys").glob("*.key")}
        assert keys == {"router", "prefill-ANY", "decode-ANY"}
        async with cluster.operator() as client:
            first = await client.complete("one two three", max_tokens=8)
            cluster.launch("decode-5")
            await asyncio.to_thread(cluster.processes["decode-5"].wait, PATIENCE)
            assert "1 nodes have joined as decode-*, which is all that its count allows" in cluster.log(
                "decode-5"
            )
            cluster.kill("decode-0")
            cluster.launch("decode-6")
            await cluster.wait_nodes(expect=["prefill-0", "decode-6"])
            assert (await client.complete("one two three", max_tokens=8)).tokens == first.tokens
            async with client.session.get("/ready") as response:
                assert (await response.json())["status"] == "ready"
