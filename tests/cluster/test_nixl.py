"""A cluster whose pages are transferred by nixl: real agents, UCX over loopback. Skipped without nixl."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError
from kv_transfer.transport.nixl.agent import load_library
from tests.cluster.conftest import OUTPUT_TOKENS, Reference
from tests.cluster.harness import Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores
CONFIG = {
    "transfer": {"transport": "nixl"},
    "security": {"isolated_network": True},
    "router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}},
    "prefill": {"chunk_tokens": 200, "prefix_cache": False},
    "decode": {"prefix_cache": False},  # the same prompts transfer all their pages again
    # A node of several ranks joins later, and would get fewer turns at first.
    "health": {"slow_start": 0.0},
}


def installed() -> bool:
    try:
        load_library()
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not installed(), reason="nixl is not installed (pip install -e '.[nixl]')")
async def test_tokens_are_right_and_a_killed_prefill_node_leaves_no_page(
    prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    """Pages wait in quarantine until the ends of liveness connections prove that the killed node writes no more.

    It has two ranks, as the decode node has; each of them writes to one rank, and the other node's only rank to both.
    """
    chosen = prompts[15:95:10]
    ranks = {"prefill-0": 2, "decode-0": 2}
    async with (
        RunningCluster(tmp_path, 2, 1, CONFIG, ranks=ranks) as cluster,
        Client(cluster.url) as client,
    ):
        answers = await client.complete_all(chosen, 8, OUTPUT_TOKENS)
        for answer, prompt in list(zip(answers, chosen, strict=True))[::4]:  # the reference is slow
            assert answer.tokens == reference(prompt, OUTPUT_TOKENS, answer.tokens)
        # Counters are sent with heartbeats.
        await client.wait_idle()
        nodes = (await client.info())["nodes"]
        assert all(node["counters"]["requests"] > 0 for node in nodes), "a node was never used"
        assert {node["config"]["transport"] for node in nodes} == {"nixl"}
        running = [asyncio.create_task(client.complete(prompt, OUTPUT_TOKENS)) for prompt in chosen]
        await asyncio.sleep(0.3)
        cluster.kill("prefill-0")
        again = await asyncio.gather(*running)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
        await client.wait_idle()
