"""Real nodes that no cluster file lists join by the pattern of their names and its key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.ipc.key_files import make_key_pairs
from tests.cluster.harness import RunningCluster, hold_port
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
            # Until then there is no room for another one.
            await client.gone("decode-0")
            cluster.launch("decode-6")
            await cluster.wait_nodes(expect=["prefill-0", "decode-6"])
            assert (await client.complete("one two three", max_tokens=8)).tokens == first.tokens
            async with client.session.get("/ready") as response:
                assert (await response.json())["status"] == "ready"


async def test_nodes_find_the_router_by_a_name(tmp_path: Path) -> None:
    """The name has an address at which nobody listens, too. A router that is started again is found again."""
    make_key_pairs(tmp_path / "keys", ["router", "prefill-*", "decode-*"])
    with hold_port() as held:
        port = held.getsockname()[1]
        config = {
            **CONFIG,
            "router": {"control_address": f"dns://localhost:{port}", "found_routers": 2},
            "security": {"keys": str(tmp_path / "keys")},
        }
        router = ("router", "--set", f"router.control_address=tcp://127.0.0.1:{port}")
        async with RunningCluster(tmp_path, 1, 1, config, router_module=router) as cluster:
            async with cluster.operator() as client:
                first = await client.complete("one two three", max_tokens=8)
            cluster.kill("router")
            cluster.launch("router")
            await cluster.wait_nodes()
            async with cluster.operator() as client:
                assert (await client.complete("one two three", max_tokens=8)).tokens == first.tokens
