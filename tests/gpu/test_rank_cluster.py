"""A cluster whose nodes have two ranks on one GPU, beside nodes of one rank, with graphs and drafts.

Ranks on one GPU take turns on it, which is slow: run this while nothing else computes there.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.config.schema import Health
from common.process import EXIT_RANK_FAILED
from tests.cluster.harness import MODEL, Client, RunningCluster, start_new
from tests.fakes.waiting import PATIENCE
from tests.gpu.expect import no_fallbacks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(400),
]
PROMPTS = [[random.Random(seed).randrange(3, 700) for _ in range(30 + 43 * seed)] for seed in range(6)]
TOKENS = 40
SECOND = os.environ.get("TANDEM_TEST_SECOND_GPU", "cuda:0")  # of the second rank; cuda:1 where there is one
TRANSPORT = os.environ.get("TANDEM_TEST_TRANSPORT", "auto")  # cuda_ipc; or nixl, where it is installed
CHOSEN = TRANSPORT.replace("auto", "cuda_ipc")


def nodes(role: str) -> list[dict[str, Any]]:
    return [{"name": f"{role}-0", "devices": ["cuda:0", SECOND]}, {"name": f"{role}-1", "device": "cuda:0"}]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    config: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "router": {"placement": {"prefill": "round_robin", "decode": "least_loaded"}},
        "speculation": {
            "algorithm": "eagle3",
            "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
            "steps": 3,
        },
        "prefill": {"nodes": nodes("prefill"), "pool_tokens": 8192, "chunk_tokens": 128, "max_batch": 8},
        "decode": {"nodes": nodes("decode"), "pool_tokens": 8192, "max_running": 8},
        "transfer": {"transport": TRANSPORT},
        "security": {"isolated_network": TRANSPORT == "nixl"},
        "health": {"loop_timeout": Health().loop_timeout, "hang_timeout": 60.0},
    }
    with RunningCluster(tmp_path_factory.mktemp("ranked"), 2, 2, config, start=start_new) as cluster:
        yield cluster


async def expect_equal_answers(client: Client) -> list[list[str]]:
    """Ask every prompt five times, of different pairs of nodes, and return the answers."""
    answers = await client.complete_all(5 * PROMPTS, 7, TOKENS)
    texts = [answer.tokens for answer in answers]
    first = texts[: len(PROMPTS)]
    assert texts == 5 * first
    assert all(len(each) == TOKENS for each in first)
    return first


def test_two_ranks_answer_like_one_and_every_forward_is_a_replay(ranked: RunningCluster) -> None:
    async def ask() -> dict[str, Any]:
        async with Client(ranked.url) as client:
            await expect_equal_answers(client)
            await client.wait_idle()
            return await client.info()

    info = asyncio.run(ask())
    assert not list(no_fallbacks(info))
    found = {node["name"]: node for node in info["nodes"]}
    for name, node in found.items():
        ranks = 2 if name.endswith("-0") else 1
        assert (node["config"]["tensor_parallel"], node["config"]["transport"]) == (ranks, CHOSEN)
        assert node["counters"]["transfers"]
        assert not node["counters"]["transfer_failures"]
        assert all(total["captured"] for total in node["counters"]["graphs"])
    assert found["decode-0"]["counters"]["spec_accepted_tokens"]
    for name in found:
        late = [line for line in ranked.log(name).splitlines() if "kernel compiled late" in line]
        assert not [line for line in late if "_peer_sum_kernel" in line]


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_node_ends_with_its_rank_and_its_requests_continue(victim: str, ranked: RunningCluster) -> None:
    async def ask() -> None:
        async with Client(ranked.url) as client:
            before = await expect_equal_answers(client)
            running = [asyncio.create_task(client.complete(prompt, TOKENS)) for prompt in 2 * PROMPTS]
            await asyncio.sleep(0.5)
            (rank,) = ranked.rank_pids(victim)
            os.kill(rank, signal.SIGKILL)
            await client.gone(victim)
            assert [(await task).tokens for task in running] == 2 * before
            code = await asyncio.to_thread(ranked.processes[victim].wait, PATIENCE)
            assert code == EXIT_RANK_FAILED
            assert "a rank of this node has failed" in ranked.log(victim)
            ranked.launch(victim)
            await ranked.wait_nodes()
            assert await expect_equal_answers(client) == before
            await client.wait_idle()

    asyncio.run(ask())
