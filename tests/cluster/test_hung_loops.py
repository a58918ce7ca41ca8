"""A main loop that hangs past its announced work: the node is lost and its requests continue elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.config.schema import Health
from common.observability.loop_watchdog import EXIT_HUNG
from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.harness import Client, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_requests_of_a_hung_node_continue_on_another(
    victim: str, reference: Reference, tmp_path: Path
) -> None:
    """The hung node's heartbeats continue. Once its loop runs again, the node registers again and serves."""
    config = {
        "router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}},
        "health": {"loop_timeout": Health().loop_timeout, "hang_timeout": 0},
    }
    prompts = [prompt_of(30 + 17 * i, i) for i in range(8)]
    cluster = RunningCluster(tmp_path, 2, 2, config, blocking=(victim,))
    async with cluster, Client(cluster.url) as client:
        await client.complete_all(prompts, 4, 12)  # lets the nodes measure the duration of forwards
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


async def test_large_forwards_are_not_hung_loops(tmp_path: Path) -> None:
    """First forwards, and growing prompts and batches, take no longer than announced, beyond the default loop_timeout.

    Routers measure that in real time, for which a busy machine may stop a node; here the nodes do, in CPU time. Only
    turns without a forward are not announced: they take much less time than the largest forward.
    """
    nodes = ("prefill-0", "decode-0")
    cluster = RunningCluster(tmp_path, config={"prefill": {"chunk_tokens": 2048}}, punctual=nodes)
    async with cluster, Client(cluster.url) as client:
        await client.complete_all([prompt_of(1900, seed) for seed in range(4)], 4, 4)
        await client.complete_all([prompt_of(length, length) for length in (1, 7, 60, 500, 1500)], 1, 30)
        await client.complete_all([prompt_of(1200, 100 + seed) for seed in range(12)], 12, 12)
        await client.wait_idle()
        prefill, decode = map(cluster.silences, nodes)
        assert max(prefill["latest"], decode["latest"]) < Health().loop_timeout
        assert prefill["latest"] < prefill["longest"] / 4


async def test_a_node_that_stays_hung_ends_its_process(reference: Reference, tmp_path: Path) -> None:
    """The node's log shows where its loop was. A supervisor would restart it; here the test does."""
    prompt = prompt_of(40, 1)
    config = {
        "router": {"placement_wait": 600.0},
        "health": {"loop_timeout": Health().loop_timeout, "hang_timeout": 3.0, "return_window": 600.0},
    }
    watched = RunningCluster(tmp_path, config=config, blocking=("decode-0",))
    async with watched, Client(watched.url) as client:
        # A node announces a minute for its first forward, and for later ones what earlier ones took.
        await client.complete(prompt_of(20, 2), 12)
        watched.block("decode-0")
        running = asyncio.create_task(client.complete(prompt, 12))
        code = await asyncio.to_thread(watched.processes["decode-0"].wait, 10 * PATIENCE)
        assert code == EXIT_HUNG, watched.log("decode-0")[-3000:]
        assert "blocking_node.py" in watched.log("decode-0")
        assert "the main loop hangs" in watched.log("decode-0").splitlines()[-1]
        watched.unblock("decode-0")
        watched.launch("decode-0")
        assert (await running).tokens == reference(prompt, 12)
        await client.wait_idle()
