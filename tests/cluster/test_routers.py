"""Several router processes of one host, in front of the same nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Reference
from tests.cluster.harness import Client, RunningCluster
from tests.fakes.api_keys import api_key
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores
BOTH = ("router", "router.1")


def prompts(count: int) -> list[list[int]]:
    return [[7 + 13 * number + 3 * at for at in range(20 + number)] for number in range(count)]


async def stream(
    client: Client, prompt: list[int], tokens: int, begun: asyncio.Event, **fields: Any
) -> list[str]:
    """Return the tokens of a streamed answer, up to its end; sets `begun` at the first."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 0, "skip_special_tokens": False, **fields}
    found: list[str] = []
    async with client.session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return found
            if data:
                for choice in json.loads(data)["choices"]:
                    found += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                begun.set()
    raise ConnectionResetError("the stream ended without [DONE]")


async def series(client: Client) -> dict[tuple[str, str], float]:
    """Return (series, router) -> value; "" for series without the label."""
    async with client.session.get("/metrics") as response:
        text = await response.text()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("router", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


async def test_any_process_answers_for_all(tmp_path: Path, reference: Reference) -> None:
    async with (
        RunningCluster(tmp_path, 1, 1, routers=2) as cluster,
        cluster.at("router") as first,
        cluster.at("router.1") as second,
        Client(cluster.url) as public,
        cluster.operator() as operator,
    ):
        asked = prompts(2)
        answers = await asyncio.gather(first.complete(asked[0], 12), second.complete(asked[1], 12))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.tokens == reference(prompt, 12)

        for client in (first, second, operator):
            found = await series(client)
            for router in BOTH:
                assert found["vllm:request_success_total", router] == 1
            assert ("vllm:num_requests_running", "") in found
            assert not any(("vllm:num_requests_running", router) in found for router in BOTH)

        # A request runs at the second process; the first one shows and aborts it.
        begun = asyncio.Event()
        headers = {"X-Request-Id": "elsewhere"}
        second.session.headers.update(headers)
        running = asyncio.create_task(stream(second, asked[0], 3000, begun))
        await asyncio.wait_for(begun.wait(), PATIENCE)
        async with first.session.get("/requests/elsewhere") as response:
            assert (await response.json())["outcome"] == "running"
        async with first.session.get("/load") as response:
            assert await response.json() == {"server_load": 1}
        async with first.session.post("/abort_request", json={"rid": "elsewhere"}) as response:
            assert response.status == 200
        assert len(await asyncio.wait_for(running, PATIENCE)) < 3000
        async with first.session.get("/requests/elsewhere") as response:
            assert (await response.json())["outcome"] == "abort"
        async with first.session.get("/requests/unknown") as response:
            assert response.status == 404

        # One operator's order pauses both; each says for itself whether it is ready.
        async with operator.session.post("/drain") as response:
            assert (await response.json())["active_requests"] == 0
        for client in (first, second):
            async with client.session.get("/ready") as response:
                assert response.status == 503
        async with operator.session.post("/resume") as response:
            assert response.status == 200
        for client in (first, second):
            async with client.session.get("/ready") as response:
                assert response.status == 200
        assert (await public.complete(asked[0], 4)).tokens == reference(asked[0], 4)


async def test_limits_of_a_key_hold_over_both_processes(tmp_path: Path) -> None:
    key = msgspec.to_builtins(api_key("secret", "team", requests_per_minute=6))
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump([{name: value for name, value in key.items() if value is not None}]))
    keys.chmod(0o600)
    config = {"security": {"api_keys": str(keys)}}
    async with RunningCluster(tmp_path, 1, 1, config, routers=2) as cluster:
        statuses: list[int] = []
        for number in range(20):
            # A connection of its own for each: the kernel spreads them over the processes.
            async with Client(cluster.url, key="secret") as client:
                body = {"prompt": [number], "max_tokens": 1}
                async with client.session.post("/v1/completions", json=body) as response:
                    statuses.append(response.status)
        # The limit refills by one in ten seconds.
        assert 6 <= statuses.count(200) <= 8
        assert set(statuses) == {200, 429}


async def test_a_killed_router_breaks_its_own_connections_only(tmp_path: Path, reference: Reference) -> None:
    """kill -9 under load on 2p2d: answers of the other process are whole, and all pages come back.

    Those of the killed one are too long to end before.
    """
    config = {"router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}}}
    async with (
        RunningCluster(tmp_path, 2, 2, config, routers=2) as cluster,
        cluster.at("router") as first,
        cluster.at("router.1") as second,
    ):
        asked = prompts(8)
        begun = [asyncio.Event() for _ in asked]
        running = [
            asyncio.create_task(
                stream((first, second)[number % 2], prompt, (100, 400)[number % 2], begun[number])
            )
            for number, prompt in enumerate(asked)
        ]
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun[:4])), PATIENCE)
        cluster.kill("router.1", signal.SIGKILL)
        done = await asyncio.gather(*running, return_exceptions=True)
        for number, (prompt, answer) in enumerate(zip(asked, done, strict=True)):
            if number % 2 == 0:
                assert isinstance(answer, list), answer
                assert answer == reference(prompt, 100, answer)
            else:
                assert isinstance(answer, ConnectionResetError | aiohttp.ClientError | list), answer
        assert any(isinstance(each, BaseException) for each in done[1::2]), "nothing ran when it was killed"
        await first.wait_idle()

        # The new process learns of the nodes without their restart, and has the same requests answered.
        cluster.launch("router.1")
        await cluster.wait_nodes()
        async with cluster.at("router.1") as again:
            answers = await again.complete_all(asked[1::2], 4, 20)
            assert [each.tokens for each in answers] == [reference(prompt, 20) for prompt in asked[1::2]]
            await again.wait_idle()


async def test_a_router_that_drains_refuses_no_request(tmp_path: Path, reference: Reference) -> None:
    """New connections go to the other process, and open ones get one more answer."""
    prompt = prompts(1)[0]
    async with RunningCluster(tmp_path, 1, 1, routers=2) as cluster:
        async with contextlib.AsyncExitStack() as opened:
            # Each has a connection that stays open; the kernel spreads them over both processes.
            clients = [await opened.enter_async_context(Client(cluster.url)) for _ in range(12)]
            for client in clients:
                await client.complete(prompt, 1)
            begun = asyncio.Event()
            own = await opened.enter_async_context(cluster.at("router.1"))
            long = asyncio.create_task(stream(own, prompt, 300, begun))
            await asyncio.wait_for(begun.wait(), PATIENCE)
            cluster.kill("router.1", signal.SIGTERM)
            for client in clients:
                assert (await client.complete(prompt, 2)).tokens == reference(prompt, 2)
            for _ in range(8):
                async with Client(cluster.url) as client:
                    assert (await client.complete(prompt, 2)).tokens == reference(prompt, 2)
            assert len(await long) == 300
        await asyncio.to_thread(cluster.processes["router.1"].wait, PATIENCE)
        assert cluster.processes["router.1"].returncode == 0
