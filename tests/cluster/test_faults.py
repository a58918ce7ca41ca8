"""kill -9 and SIGSTOP of each role with requests in flight, clients that disconnect, and garbage on the sockets.

Outcomes are those of docs/faults.md: every request gets its answer or a clear error, none hangs, no page leaks.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path

import aiohttp
import pytest
import zmq

from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.constrained_answers import Questions, expect_constrained
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.masked_reference import MaskedReference
from tests.fakes.waiting import PATIENCE, eventually

QUICK = {"heartbeat_interval": 0.1, "node_timeout": 1.5, "router_timeout": 1.5}
pytestmark = pytest.mark.timeout(900)  # two busy cores
LONG = 200  # tokens: long enough to be interrupted


async def next_event(response: aiohttp.ClientResponse) -> None:
    """Read the next event: a token."""
    async for line in response.content:
        if line.startswith(b"data: "):
            return
    raise AssertionError("the stream ended without an event")


def streaming(prompt: list[int], max_tokens: int = LONG) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def test_killed_node_is_replaced_by_another(
    tmp_path: Path, reference: Reference, masked_reference: MaskedReference
) -> None:
    """A node of each role is killed while requests are everywhere: all end with the tokens of an undisturbed run.

    Some of the answers have random grammars, greedy and seeded: their place in the grammar moves with them.

    The health bounds are the harness's: a dead process is noticed by its closed socket, not by its silence.
    """
    config = {"router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}}}
    prompts = [prompt_of(40 + 45 * i, i) for i in range(8)]
    asked = Questions(MODEL).all([f"schema/{number}" for number in range(30, 34)])
    async with RunningCluster(tmp_path, 2, 2, config) as cluster, Client(cluster.url) as client:
        for victim in ("prefill-0", "decode-0"):
            running = [asyncio.create_task(client.complete(prompt, 60)) for prompt in prompts]
            constrained = asyncio.create_task(expect_constrained(client, asked, masked_reference))
            await asyncio.sleep(0.4)
            cluster.kill(victim)
            await client.gone(victim)
            answers = await asyncio.gather(*running)
            await constrained
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == reference(prompt, 60, answer.tokens)
            await client.wait_idle()
            cluster.launch(victim)
            await cluster.wait_nodes()
            again = await client.complete_all(prompts, 8, 20)
            assert [a.tokens for a in again] == [reference(p, 60)[:20] for p in prompts]
            await client.wait_idle()
        for name in ("prefill-1", "decode-1"):
            await _drain(cluster, client, name, prompts[:4], reference)


async def _drain(
    cluster: RunningCluster, client: Client, name: str, prompts: list[list[int]], reference: Reference
) -> None:
    """A node that is asked to drain under load fails no request and exits with 0."""
    running = [asyncio.create_task(client.complete(prompt, 60)) for prompt in prompts]
    async with client.session.post("/v1/completions", json=streaming(prompts[0], LONG)) as response:
        await next_event(response)
        cluster.kill(name, signal.SIGTERM)
        assert "[DONE]" in await response.text()
    running += [asyncio.create_task(client.complete(prompt, 60)) for prompt in prompts]
    for prompt, answer in zip(2 * prompts, await asyncio.gather(*running), strict=True):
        assert answer.tokens == reference(prompt, 60, answer.tokens)
    await client.gone(name)
    assert await asyncio.to_thread(cluster.processes[name].wait, PATIENCE) == 0
    await client.wait_idle()


async def test_last_node_of_a_role_killed_gives_an_error_at_once(tmp_path: Path) -> None:
    """No other node can continue: streams get an SSE error without [DONE], new requests 503 with Retry-After.

    Without a prefill node no prompt is computed, but answers that have been handed over continue.
    """
    config = {"router": {"placement_wait": 0.5}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        async with client.session.post("/v1/completions", json=streaming(prompt_of(50, 1), 4000)) as response:
            await next_event(response)
            cluster.kill("decode-0")
            rest = await response.text()
        assert "[DONE]" not in rest
        events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: ")]
        assert events[-1]["error"]["code"] in ("unavailable", "node_lost")
        async with client.session.post("/v1/completions", json=streaming([5, 6])) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        async with client.session.get("/ready") as response:
            assert response.status == 503
            assert "decode" in (await response.json())["reason"]
        await client.wait_idle()
        cluster.launch("decode-0")
        await cluster.wait_nodes()
        async with client.session.post("/v1/completions", json=streaming(prompt_of(50, 1), 300)) as response:
            for _ in range(3):
                await next_event(response)  # the third token comes from the decode node
            cluster.kill("prefill-0")
            await client.gone("prefill-0")
            assert "[DONE]" in await response.text()
        async with client.session.post("/v1/completions", json=streaming([5, 6])) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        async with client.session.get("/ready") as response:
            assert response.status == 503
            assert "no prefill node" in (await response.json())["reason"]
        async with client.session.get("/metrics") as response:
            refused = 'tandem_requests_refused_without_node_total{role="prefill"} '
            assert refused in await response.text()
        await client.wait_idle()


async def test_killed_router_frees_the_nodes_and_a_new_one_finds_them(tmp_path: Path) -> None:
    async with RunningCluster(tmp_path) as cluster:
        async with Client(cluster.url) as client:
            async with client.session.post(
                "/v1/completions", json=streaming(prompt_of(300, 2), 3700)
            ) as response:
                await next_event(response)
                cluster.kill("router")
                with pytest.raises(aiohttp.ClientError):
                    await response.text()
        cluster.launch("router")
        await cluster.wait_nodes()
        async with Client(cluster.url) as client:
            await client.wait_idle()
            assert (await client.node("decode-0"))["counters"]["requests"] == 1, (
                "the node was restarted, not found"
            )
            await client.complete(prompt_of(300, 2), 5)
            await client.wait_idle()


async def test_a_stopped_node_is_lost_and_returns_without_its_requests(
    tmp_path: Path, reference: Reference
) -> None:
    """After SIGSTOP for longer than the bound, requests continue elsewhere and the resumed process disturbs nobody."""
    placement = {"prefill": "round_robin", "decode": "round_robin"}
    # Other nodes may be lost, too, if this host stalls.
    patient = {"max_attempts": 10, "placement_wait": PATIENCE}
    config = {"health": QUICK, "router": {"placement": placement, **patient}}
    prompts = [prompt_of(60 + 40 * i, 50 + i) for i in range(8)]
    async with RunningCluster(tmp_path, 2, 2, config) as cluster, Client(cluster.url) as client:
        for victim in ("prefill-0", "decode-0"):
            running = [asyncio.create_task(client.complete(prompt, 60)) for prompt in prompts]
            await asyncio.sleep(0.3)
            cluster.kill(victim, signal.SIGSTOP)
            answers = await asyncio.wait_for(asyncio.gather(*running), 2 * PATIENCE)
            assert [a.tokens for a in answers] == [
                reference(p, 60, a.tokens) for p, a in zip(prompts, answers, strict=True)
            ]
            await client.gone(victim)
            cluster.kill(victim, signal.SIGCONT)
            await cluster.wait_nodes()
            again = await client.complete_all(prompts, 8, 20)
            assert [a.tokens for a in again] == [reference(p, 60)[:20] for p in prompts]
            await client.wait_idle()


async def test_a_router_that_stalls_costs_no_request(tmp_path: Path, reference: Reference) -> None:
    """During 5 s of SIGSTOP all nodes drop the router's requests; nothing is placed until they are back."""
    prompts = [prompt_of(60 + 40 * i, 90 + i) for i in range(4)]
    health = {"node_timeout": 3.0, "router_timeout": 2.0, "loop_timeout": 600.0}
    config = {"health": health, "router": {"placement_wait": PATIENCE}}
    async with RunningCluster(tmp_path, 2, 2, config) as cluster, Client(cluster.url) as client:
        # The first ones are still being decoded when the router stops. Those sent afterwards need not be that long.
        asked = [(prompt, said) for said in (250, 30) for prompt in prompts]
        running = [asyncio.create_task(client.complete(*each)) for each in asked[:4]]
        await asyncio.sleep(0.5)
        cluster.kill("router", signal.SIGSTOP)
        await asyncio.sleep(5)
        cluster.kill("router", signal.SIGCONT)
        running += [asyncio.create_task(client.complete(*each)) for each in asked[4:]]
        answers = await asyncio.wait_for(asyncio.gather(*running), 2 * PATIENCE)
        assert [a.tokens for a in answers] == [
            reference(*each, a.tokens) for each, a in zip(asked, answers, strict=True)
        ]
        await client.wait_idle()


async def test_requests_wait_while_the_only_node_of_a_role_restarts(
    tmp_path: Path, reference: Reference
) -> None:
    """The node is in the cluster file and has just left, so it is expected back: no request is answered with 503.

    One request began earlier and continues: at once if the decode node already has it, otherwise after the return.
    """
    prompts = [prompt_of(40 + 10 * i, 70 + i) for i in range(12)]
    config = {"router": {"placement_wait": PATIENCE}, "health": {"return_window": 600.0}}
    async with RunningCluster(tmp_path, 1, 1, config) as cluster, Client(cluster.url) as client:
        undisturbed = await client.complete(prompts[0], LONG, skip_special_tokens=True)
        for victim in ("prefill-0", "decode-0"):
            async with client.session.post("/v1/completions", json=streaming(prompts[0], LONG)) as begun:
                for _ in range(3):
                    await next_event(begun)  # the third one comes from the decode node
                cluster.kill(victim)
                await client.gone(victim)
                running = [asyncio.create_task(client.complete(prompt, 20)) for prompt in prompts]
                async with client.session.get("/ready") as response:
                    assert response.status == 503
                cluster.launch(victim)
                answers = await asyncio.wait_for(asyncio.gather(*running), 2 * PATIENCE)
                rest = await begun.text()
            assert [a.tokens for a in answers] == [
                reference(p, 20, a.tokens) for p, a in zip(prompts, answers, strict=True)
            ]
            assert "[DONE]" in rest
            said = "".join(
                json.loads(line[6:])["choices"][0]["text"] for line in rest.splitlines() if line[6:7] == "{"
            )
            assert undisturbed.text.endswith(said)
            await client.wait_idle()


async def test_client_that_leaves_frees_both_nodes(tmp_path: Path) -> None:
    """Clients leave at every station that they can see: queued, prefilling in chunks, streaming."""
    config = {
        "prefill": {"chunk_tokens": 16, "max_batch": 2},
        "decode": {"max_running": 2, "max_transferring": 2},
    }
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        for delay in (0.0, 0.02, 0.1, 0.3, 0.8):
            requests = [
                asyncio.create_task(
                    client.session.post("/v1/completions", json=streaming(prompt_of(700, 10 * i), 1000))
                )
                for i in range(8)
            ]
            await asyncio.sleep(delay)
            for request in requests:
                request.cancel()
            left = await asyncio.gather(*requests, return_exceptions=True)
            for response in left:
                if isinstance(response, aiohttp.ClientResponse):
                    response.close()
            await client.wait_idle(30)  # less than any deadline of the requests or their transfers
        answer = await client.complete(prompt_of(30, 1), 5)
        assert len(answer.tokens) == 5


async def test_sighup_does_not_end_a_router_without_keys(cluster: RunningCluster) -> None:
    cluster.kill("router", signal.SIGHUP)
    await eventually(lambda: "nothing to reload" in cluster.log("router"))
    async with Client(cluster.url) as client:
        assert len((await client.complete(prompt_of(20, 6), 4)).tokens) == 4


async def test_garbage_on_every_socket_is_refused_counted_and_survived(cluster: RunningCluster) -> None:
    """An unknown peer sends random, truncated and oversized frames to the router's and the prefill node's sockets."""
    rng = random.Random(3)
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        for stranger, name in zip(strangers, ("router", "prefill-0"), strict=True):
            stranger.setsockopt(zmq.IDENTITY, b"stranger/" + os.urandom(16).hex().encode())
            stranger.connect(f"ipc://{cluster.run_dir}/{name}.sock")
            for size in (0, 1, 20, 300, 70_000):
                stranger.send(rng.randbytes(size))
                stranger.send_multipart([b"", rng.randbytes(size), b"x"])
            stranger.send(b"TKVT" + os.urandom(28))
            stranger.send(b"\x81\xa4type\xa8Register")
        async with Client(cluster.url) as client:
            deadline = time.monotonic() + PATIENCE
            while not (await client.node("prefill-0"))["counters"]["refused_messages"] or (
                "refused a frame" not in cluster.log("router")
            ):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
    finally:
        context.destroy(linger=0)
    async with Client(cluster.url) as client:
        answer = await client.complete(prompt_of(40, 5), 8)
        assert len(answer.tokens) == 8
        await client.wait_idle()
