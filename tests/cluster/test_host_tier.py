"""Cached prefixes in host memory on real processes: sessions that do not fit into pools are computed and sent once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.harness import MODEL, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores

SESSIONS = 4
TOKENS = 640  # of a session; 512 of them are whole blocks
NODES = ("prefill-0", "prefill-1")
CONFIG = {
    "router": {"placement": {"prefill": "round_robin"}},
    # A node of several ranks joins later, and would get fewer turns at first.
    "health": {"slow_start": 0.0},
    "speculation": {
        "algorithm": "eagle3",
        "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
        "steps": 3,
    },
    "prefill": {
        "pool_tokens": 800,
        "chunk_tokens": 1024,
        "host_mib": 24,
        "graphs": "breakable",
        "enforce_graphs": True,
    },
    "decode": {"pool_tokens": 900, "host_mib": 24, "backup_mib": 8},
    "transfer": {"layers": True},
}


async def test_sessions_beyond_the_pool_are_computed_once(reference: Reference, tmp_path: Path) -> None:
    """Each session is computed once and then continues from host memory, also with many requests at once.

    Two of them are on a prefill node of two ranks, each of which keeps its share, and two on a node of one; the decode
    node has two ranks.
    """
    rng = random.Random(5)
    texts = [[rng.randrange(3, 400) for _ in range(TOKENS)] for _ in range(SESSIONS)]
    expected = [reference(text, 12) for text in texts]
    async with (
        RunningCluster(tmp_path, 2, config=CONFIG, ranks={"prefill-0": 2, "decode-0": 2}) as cluster,
        Client(cluster.url) as client,
    ):
        found = []
        for _ in range(2):
            for text, answer in zip(texts, expected, strict=True):
                given = await client.complete(text, 12)
                assert given.tokens == answer
                found.append(given.usage["prompt_tokens_details"]["cached_tokens"])
                await client.wait_idle()
        assert found == [0] * SESSIONS + [512] * SESSIONS
        nodes = [await client.node(name) for name in NODES]
        decode = await client.node("decode-0")
        async with client.session.get("/metrics") as response:
            metrics = await response.text()
        # All at once: their loads share forwards, and pages are free only after their copies.
        for given, answer in zip(await client.complete_all(texts * 3, 12, 12), expected * 3, strict=True):
            assert given.tokens == answer
        await client.wait_idle()
        after = [(await client.node(name))["counters"] for name in NODES]
        decoded = (await client.node("decode-0"))["counters"]
    for name, node, counters in zip(NODES, nodes, after, strict=True):
        assert node["load"]["host_cached_tokens"] == SESSIONS // 2 * 512
        assert node["counters"]["host_loads"] == SESSIONS // 2
        assert f'tandem_host_tier_tokens{{engine="{name}"' in metrics
        assert counters["host_loads"] > SESSIONS // 2
        assert counters["host_checksum_failures"] == counters["transfer_failures"] == 0
    assert decode["load"]["host_cached_tokens"] == decode["counters"]["host_hits"] == SESSIONS * 512
    assert 'tandem_host_tier_tokens{engine="decode-0"' in metrics
    assert decoded["host_hits"] > SESSIONS * 512
    assert decoded["host_checksum_failures"] == decoded["transfer_failures"] == 0
    assert nodes[0]["counters"]["host_hits"] == nodes[1]["counters"]["host_hits"] > 0
    assert nodes[0]["counters"]["host_loaded_bytes"] == nodes[1]["counters"]["host_loaded_bytes"] > 0
