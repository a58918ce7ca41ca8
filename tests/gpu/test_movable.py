"""A movable node on a GPU, with the graphs of both roles: it changes its role under load and computes short prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.config.schema import Health
from tests.cluster.harness import MODEL, Client, RunningCluster, start_new
from tests.gpu.expect import no_fallbacks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(400),
]
PROMPTS = [[random.Random(seed).randrange(3, 700) for _ in range(20 + 17 * seed)] for seed in range(6)]
LONG = [[random.Random(seed).randrange(3, 700) for _ in range(1900)] for seed in range(100, 108)]
TOKENS = 40
GPU = {"device": "cuda:0"}


@pytest.fixture(scope="module")
def movable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    config: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}, "local_prefill": 128},
        "speculation": {
            "algorithm": "eagle3",
            "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
            "steps": 3,
        },
        "prefill": {
            "nodes": [{"name": "prefill-0", **GPU}, {"name": "flex-0", **GPU}],
            "pool_tokens": 32_768,
            "chunk_tokens": 256,
            "max_batch": 8,
        },
        "decode": {
            "nodes": [{"name": "decode-0", **GPU}, {"name": "flex-0", **GPU}],
            "pool_tokens": 32_768,
            "max_running": 16,
        },
        "movable": {"nodes": [{"name": "flex-0"}], "prefill_pool_tokens": 16_384},
        "health": {"loop_timeout": Health().loop_timeout, "hang_timeout": 60.0},
    }
    directory = tmp_path_factory.mktemp("movable")
    with RunningCluster(directory, 1, 1, config, movable=1, start=start_new) as cluster:
        yield cluster


async def change(operator: Client, role: str) -> None:
    async with operator.session.post("/workers/flex-0/role", json={"role": role}) as response:
        assert response.status == 200, await response.text()


def test_a_role_changes_under_load_and_every_forward_is_a_replay(movable: RunningCluster) -> None:
    async def load(client: Client, expected: list[list[str]], over: asyncio.Event) -> None:
        while not over.is_set():
            answers = await client.complete_all(PROMPTS, 6, TOKENS)
            assert [each.tokens for each in answers] == expected

    async def ask() -> dict[str, Any]:
        async with Client(movable.url) as client, movable.operator() as operator:
            expected = [each.tokens for each in await client.complete_all(PROMPTS, 1, TOKENS)]
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(load(client, expected, over))
                for role in 3 * ("prefill", "decode"):
                    await asyncio.sleep(0.5)
                    await change(operator, role)
                over.set()
            await client.wait_idle()
            return await client.info()

    info = asyncio.run(ask())
    assert not list(no_fallbacks(info))
    node = next(each for each in info["nodes"] if each["name"] == "flex-0")
    assert (node["role"], node["movable"], node["config"]["transport"]) == ("decode", True, "cuda_ipc")
    assert node["counters"]["spec_accepted_tokens"]
    assert not node["counters"]["transfer_failures"]
    assert movable.log("flex-0").count('"role changed"') == 6


def test_short_prompts_do_not_wait_for_long_ones(movable: RunningCluster) -> None:
    """Their pages move within the process, which opens no CUDA handle of its own."""

    async def ask() -> list[tuple[str, ...]]:
        async with Client(movable.url) as client, movable.operator() as operator:
            expected = [each.tokens for each in await client.complete_all(PROMPTS, 1, TOKENS)]
            await client.wait_idle()
            busy = [asyncio.create_task(client.complete(prompt, 2)) for prompt in LONG]
            while not (await client.node("prefill-0"))["assigned"]:
                await asyncio.sleep(0.001)
            answers = await client.complete_all(PROMPTS, 6, TOKENS)
            assert [each.tokens for each in answers] == expected
            await asyncio.gather(*busy)
            await client.wait_idle()
            async with operator.session.get("/requests", params={"limit": "14"}) as response:
                return [tuple(each["nodes"][-1].values()) for each in (await response.json())["requests"]]

    pairs = asyncio.run(ask())
    assert ("flex-0", "flex-0") in pairs, pairs
    assert "kernel compiled late" not in movable.log("flex-0")
