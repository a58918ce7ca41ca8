"""A main loop that hangs past the work that it announced: the node is lost, its requests continue elsewhere."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from common.config.schema import Health
from tests.cluster.conftest import Reference
from tests.cluster.harness import Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 700) for _ in range(length)]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_requests_of_a_hung_node_continue_on_another(
    victim: str, reference: Reference, tmp_path: Path
) -> None:
    """Its heartbeats go on all the time. Once its loop comes round again the node registers again and serves."""
    config = {
        "router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}},
        "health": {"loop_timeout": Health().loop_timeout},
    }
    prompts = [prompt_of(30 + 17 * i, i) for i in range(8)]
    cluster = RunningCluster(tmp_path, 2, 2, config, blocking=(victim,))
    async with cluster, Client(cluster.url) as client:
        await client.complete_all(prompts, 4, 12)  # the nodes have measured what forwards take
        cluster.block(victim)
        running = [asyncio.create_task(client.complete(prompt, 12)) for prompt in prompts]
        await client.gone(victim)
        for prompt, task in zip(prompts, running, strict=True):
            assert (await task).tokens == reference(prompt, 12)
        assert "s of work announced" in cluster.log("router")
        cluster.unblock(victim)
        await cluster.wait_nodes()
        for answer, prompt in zip(await client.complete_all(prompts, 4, 12), prompts, strict=True):
            assert answer.tokens == reference(prompt, 12)
        await client.wait_idle()


async def test_large_forwards_of_a_busy_machine_are_not_hung_loops(tmp_path: Path) -> None:
    """With the default of loop_timeout: first forwards, growing prompts and batches, nothing is lost."""
    config = {"health": {"loop_timeout": Health().loop_timeout}, "prefill": {"chunk_tokens": 2048}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        await client.complete_all([prompt_of(1900, seed) for seed in range(6)], 6, 4)
        await client.complete_all([prompt_of(length, length) for length in (1, 7, 60, 500, 1500)], 1, 30)
        await client.complete_all([prompt_of(1200, 100 + seed) for seed in range(24)], 24, 30)
        await client.wait_idle()
        assert "node lost" not in cluster.log("router")
