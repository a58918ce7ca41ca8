"""A short request among many long ones, in real processes: it is served next, not last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.harness import Client, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores
LONG, MANY = 900, 40


async def waiting_for_room(client: Client) -> float:
    async with client.session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    (line,) = [each for each in lines if each.startswith("tandem_requests_waiting_for_room ")]
    return float(line.rpartition(" ")[2])


async def test_a_short_request_does_not_wait_for_long_ones(tmp_path: Path, reference: Reference) -> None:
    """The pool holds three of the long requests. In arrival order the short one would come after all of them."""
    config = {
        "decode": {"pool_tokens": 4096},
        "prefill": {"pool_tokens": 4096},
        "router": {"queue_wait": 600.0},
    }
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        done: list[int] = []

        async def long(number: int) -> None:
            await client.complete(prompt_of(LONG, number), 100)
            done.append(number)

        tasks = [asyncio.create_task(long(number)) for number in range(MANY)]
        # Send it at once: waiting lowers costs, so on a slow machine the long requests would soon be served first.
        async with asyncio.timeout(PATIENCE):
            while not done and await waiting_for_room(client) < MANY // 2:
                await asyncio.sleep(0.01)
        before = len(done)
        answer = await client.complete(prompt_of(20, 999), 8)
        assert answer.tokens == reference(prompt_of(20, 999), 8)
        assert len(done) - before < MANY // 2, (
            "only requests admitted earlier, and a few others, may end first"
        )
        for task in tasks:
            task.cancel()  # the remaining answers show nothing more
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.wait_idle()
