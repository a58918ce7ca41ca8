"""A movable node changes its role while requests run, and fails none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores
ROUND_ROBIN = {"prefill": "round_robin", "decode": "round_robin"}
TOKENS = 24


async def ask(operator: Client, name: str, role: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with operator.session.post(f"/workers/{name}/role", json={"role": role, **body}) as response:
        return response.status, await response.json()


async def load(client: Client, prompt: list[int], expected: list[str], over: asyncio.Event) -> int:
    """Send one request after another until `over`; return how many were answered as expected."""
    count = 0
    while not over.is_set():
        assert (await client.complete(prompt, TOKENS)).tokens == expected
        count += 1
    return count


async def used(client: Client, name: str, role: str) -> None:
    """Wait until the node has served a request in this role."""
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            node = await client.node(name)
            if node["role"] == role and node["counters"]["generated_tokens"]:
                return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Run a cluster whose nodes record graphs and have a draft model, so that halves share everything that they can.

    Its prefill node can be blocked.
    """
    config: dict[str, Any] = {
        "router": {"placement": ROUND_ROBIN, "local_prefill": 128},
        "speculation": {
            "algorithm": "eagle3",
            "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
            "steps": 3,
        },
        "prefill": {"graphs": "breakable", "enforce_graphs": True, "chunk_tokens": 256, "max_batch": 8},
        "decode": {"graphs": "full", "max_running": 8},
        "process": {"poison_graphs": True},
    }
    directory = tmp_path_factory.mktemp("movable")
    with RunningCluster(directory, 1, 1, config, movable=1, blocking=("prefill-0",)) as running:
        yield running


async def test_a_role_changes_under_load_without_a_failed_request(
    cluster: RunningCluster, reference: Reference
) -> None:
    prompts = [prompt_of(20 + 45 * i, 300 + i) for i in range(4)]
    expected = [reference(prompt, TOKENS) for prompt in prompts]
    async with Client(cluster.url) as client, cluster.operator() as operator:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(load(client, *each, over)) for each in zip(prompts, expected, strict=True)
            ]
            for role, previous in (("prefill", "decode"), ("decode", "prefill")):
                await used(client, "flex-0", previous)
                status, answer = await ask(operator, "flex-0", role)
                assert (status, answer["role"], answer["previous"]) == (200, role, previous), answer
                node = await client.node("flex-0")
                assert (node["role"], node["state"], node["movable"]) == (role, "up", True)
            await used(client, "flex-0", "decode")
            over.set()
        assert min(task.result() for task in running) > 0
        await client.wait_idle()
        assert "node lost" not in cluster.log("router")
        await _refusals(operator)


async def _refusals(operator: Client) -> None:
    status, answer = await ask(operator, "decode-0", "prefill")
    assert status == 409
    assert "decode-0 is a decode node for good" in answer["error"]["message"]
    assert (await ask(operator, "flex-7", "prefill"))[0] == 404
    status, answer = await ask(operator, "flex-0", "router")
    assert (status, answer["error"]["param"]) == (400, "role")


async def test_short_prompts_are_computed_where_they_are_decoded(
    cluster: RunningCluster, reference: Reference
) -> None:
    """They do not wait for long ones on the prefill node, and their answers are those of any other pair of nodes."""
    short = [prompt_of(20 + 30 * i, 70 + i) for i in range(4)]
    expected = [reference(prompt, TOKENS) for prompt in short]
    async with Client(cluster.url) as client, cluster.operator() as operator:
        cluster.block("prefill-0")
        long = [asyncio.create_task(client.complete(prompt_of(1400, 40 + i), 2)) for i in range(4)]
        async with asyncio.timeout(PATIENCE):
            while (await client.node("prefill-0"))["assigned"] < len(long):
                await asyncio.sleep(0.01)
        answers = await client.complete_all(short, 4, TOKENS)
        cluster.unblock("prefill-0")
        await asyncio.gather(*long)
        assert [each.tokens for each in answers] == expected
        async with operator.session.get("/requests", params={"limit": "8"}) as response:
            pairs = [tuple(each["nodes"][0].values()) for each in (await response.json())["requests"]]
        assert pairs.count(("flex-0", "flex-0")) == len(short), pairs
        await client.wait_idle()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_node_costs_no_request_and_returns_in_its_first_role(
    role: str, cluster: RunningCluster, reference: Reference
) -> None:
    prompts = [prompt_of(30 + 40 * i, 500 + i) for i in range(6)]
    expected = [reference(prompt, TOKENS) for prompt in prompts]
    async with Client(cluster.url) as client, cluster.operator() as operator:
        assert (await ask(operator, "flex-0", role))[0] == 200
        before = (await client.node("flex-0"))["counters"]["requests"]
        running = [asyncio.create_task(client.complete(prompt, TOKENS)) for prompt in prompts]
        async with asyncio.timeout(PATIENCE):
            while (await client.node("flex-0"))["counters"]["requests"] == before:
                await asyncio.sleep(0.01)
        cluster.kill("flex-0")
        assert [(await task).tokens for task in running] == expected
        await client.gone("flex-0")
        cluster.launch("flex-0")
        await cluster.wait_nodes(expect=["flex-0"])
        assert (await client.node("flex-0"))["role"] == "decode"
        assert (await client.complete(prompts[0], TOKENS)).tokens == expected[0]
        await client.wait_idle()
