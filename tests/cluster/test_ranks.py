"""Nodes of several ranks beside nodes of one: every pair of them gives the same answers, and ranks may fail."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from common.config.schema import Health
from common.process import EXIT_RANK_FAILED
from common.process_entry import start_time
from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.constrained_answers import Questions, expect_constrained
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.masked_reference import MaskedReference
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(900)  # two busy cores


PROMPTS = [prompt_of(30 + 43 * i, i) for i in range(8)]
# They are admitted together, and then grow until some are retracted.
SHORT = [prompt_of(5, i) for i in range(10)]
PAIRS = set(product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")))


async def last_pairs(client: Client) -> set[tuple[str, str]]:
    """Return the pairs of nodes that the last requests were placed on."""
    async with client.session.get("/requests", params={"limit": 40}) as response:
        placed = [each for said in (await response.json())["requests"] for each in said["nodes"]]
    return {(each["prefill"], each["decode"]) for each in placed}


async def nodes_of(client: Client) -> dict[str, Any]:
    return {node["name"]: node for node in (await client.info())["nodes"]}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Run a node of two ranks and a node of one rank in each role; requests take all four pairs."""
    config = {
        # Two policies that take turns would always choose the same pairs: of prefill nodes, one is drawn.
        "router": {"placement": {"prefill": "least_loaded", "decode": "round_robin", "temperature_ms": 1e6}},
        "speculation": {
            "algorithm": "eagle3",
            "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
            "steps": 3,
        },
        # Requests are retracted.
        "decode": {"pool_tokens": 448, "reserved_tokens": 0},
        "prefill": {"chunk_tokens": 128},
        "health": {"loop_timeout": Health().loop_timeout, "hang_timeout": 60.0, "slow_start": 0.0},
    }
    ranks = {"prefill-0": 2, "decode-0": 2}
    with RunningCluster(tmp_path_factory.mktemp("ranked"), 2, 2, config, ranks=ranks) as cluster:
        yield cluster


async def test_every_pair_of_sizes_gives_the_same_answers(
    ranked: RunningCluster, reference: Reference, masked_reference: MaskedReference
) -> None:
    """Greedy answers and answers with grammars, while requests are retracted."""
    asked = Questions(MODEL).all([f"schema/{number}" for number in range(30, 32)])
    async with Client(ranked.url) as client:

        async def check(prompts: list[list[int]], most: int) -> None:
            answers = await client.complete_all(prompts, 16, most)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == reference(prompt, most, answer.tokens)

        await check(2 * PROMPTS, 60)
        await check(SHORT, 100)
        # On a busy machine some may end before the others have grown.
        for _ in range(5):
            if (await nodes_of(client))["decode-0"]["counters"]["retractions"]:
                break
            await check(2 * SHORT, 100)
        await expect_constrained(client, asked, masked_reference)
        pairs = await last_pairs(client)
        # The draws can leave a pair out.
        for _ in range(5):
            if pairs == PAIRS:
                break
            await client.complete_all(PROMPTS, 8, 20)
            pairs |= await last_pairs(client)
        assert pairs == PAIRS
        await client.wait_idle()
        nodes = await nodes_of(client)
    assert {name: node["config"]["tensor_parallel"] for name, node in nodes.items()} == {
        "prefill-0": 2,
        "prefill-1": 1,
        "decode-0": 2,
        "decode-1": 1,
    }
    for node in nodes.values():
        assert node["tp_size"] == len(node["ranks"]) == node["config"]["tensor_parallel"]
        assert all(rank["device"] == "cpu" and rank["memory_bytes"] > 0 for rank in node["ranks"])
    first, second = nodes["decode-0"]["ranks"]
    assert first["plans"] >= second["plans"] > 0
    assert first["plans"] - second["plans"] <= second["behind"] <= 2
    assert first["collective_wait_seconds"] > 0 < second["collective_wait_seconds"]
    assert first["pages"] == second["pages"]
    counters = nodes["decode-0"]["counters"]
    assert counters["retractions"]
    assert counters["spec_accepted_tokens"]
    assert all(node["counters"]["transfers"] for node in nodes.values())
    assert not any(node["counters"]["transfer_failures"] for node in nodes.values())


@pytest.mark.parametrize(("victim", "number"), [("decode-0", signal.SIGKILL), ("prefill-0", signal.SIGSTOP)])
async def test_a_node_ends_with_its_rank_and_its_requests_continue(
    victim: str, number: signal.Signals, ranked: RunningCluster, reference: Reference
) -> None:
    async with Client(ranked.url) as client:
        running = [asyncio.create_task(client.complete(prompt, 60)) for prompt in PROMPTS]
        await asyncio.sleep(0.4)
        (rank,) = ranked.rank_pids(victim)
        os.kill(rank, number)
        await client.gone(victim)
        for prompt, task in zip(PROMPTS, running, strict=True):
            assert (await task).tokens == reference(prompt, 60)
        assert await asyncio.to_thread(ranked.processes[victim].wait, PATIENCE) == EXIT_RANK_FAILED
        await eventually(lambda: start_time(rank) is None)
        assert "a rank of this node has failed" in ranked.log(victim)
        ranked.launch(victim)
        await ranked.wait_nodes()
        again = await client.complete_all(PROMPTS, 8, 20)
        assert [answer.tokens for answer in again] == [reference(prompt, 60)[:20] for prompt in PROMPTS]
        await client.wait_idle()
