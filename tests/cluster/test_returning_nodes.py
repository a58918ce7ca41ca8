"""Nodes that come back while requests run: after a stop that counted as a death, and one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.conftest import Reference, prompt_of
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.test_faults import QUICK, next_event, streaming
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores
LONG = 320  # tokens: too many to be decoded before a signal arrives
HALF = 180  # the same, where the signal follows at once
DRAIN_SECONDS = 5 * PATIENCE
ROUND_ROBIN = {"prefill": "round_robin", "decode": "round_robin"}


def text_in(events: str) -> str:
    """Return the text of a completion's events, which must end without an error."""
    *lines, last = [line for line in events.splitlines() if line]
    assert last == "data: [DONE]", events[-500:]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    return "".join(choice["text"] for choice in choices)


@contextlib.asynccontextmanager
async def decoding(
    client: Client, prompt: list[int], tokens: int = LONG
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Open a stream and wait until a decode node generates it."""
    async with client.session.post("/v1/completions", json=streaming(prompt, tokens)) as response:
        assert response.status == 200
        for _ in range(3):  # only the first token is the prefill node's
            await next_event(response)
        yield response


async def test_a_zombie_drops_its_requests_and_reaches_no_client(tmp_path: Path) -> None:
    """A node is stopped in the middle of a stream, and continued once the stream has ended on another node."""
    prompt = prompt_of(60, 5)
    # Other nodes may be lost, too, if this host stalls.
    patient = {"max_attempts": 10, "placement_wait": PATIENCE}
    config = {"health": QUICK, "router": {"placement": ROUND_ROBIN, **patient}}
    async with RunningCluster(tmp_path, 1, 2, config) as cluster, Client(cluster.url) as client:
        undisturbed = (await client.complete(prompt, LONG, skip_special_tokens=True)).text
        await client.wait_idle()  # counters are those of now
        before = (await client.node("decode-0"))["counters"]["generated_tokens"]
        async with decoding(client, prompt) as first, decoding(client, prompt) as second:
            cluster.kill("decode-0", signal.SIGSTOP)
            rest = await asyncio.wait_for(asyncio.gather(first.text(), second.text()), 2 * PATIENCE)
        assert [undisturbed.endswith(text_in(each)) for each in rest] == [True, True]
        await client.gone("decode-0")
        cluster.kill("decode-0", signal.SIGCONT)
        await cluster.wait_nodes(PATIENCE)
        await client.wait_idle()
        after = (await client.node("decode-0"))["counters"]["generated_tokens"]
        assert after - before < LONG - 10, "it has not finished the requests that it had when it was stopped"
        assert "dropping its requests" in cluster.log("decode-0")
        assert cluster.processes["decode-0"].poll() is None, "the same process serves again"


async def test_a_rolling_restart_fails_no_request(tmp_path: Path, reference: Reference) -> None:
    """Both decode nodes restart under load, one after the other: each finishes what it has begun."""
    prompts = [prompt_of(30 + 25 * i, 200 + i) for i in range(2)]
    tokens = 30

    async def load(client: Client, prompt: list[int], over: asyncio.Event) -> None:
        while not over.is_set():
            assert (await client.complete(prompt, tokens)).tokens == reference(prompt, tokens)

    # On two busy cores a stream may take longer than the default, after which the node ends and it is placed again.
    config = {"router": {"placement": ROUND_ROBIN}, "health": {"drain_timeout": DRAIN_SECONDS}}
    async with RunningCluster(tmp_path, 1, 2, config) as cluster, Client(cluster.url) as client:
        expected = (await client.complete(prompts[0], HALF, skip_special_tokens=True)).text
        for name in ("decode-0", "decode-1"):
            over = asyncio.Event()
            # Round robin puts one stream on each node, since nothing else is placed between them.
            async with (
                decoding(client, prompts[0], HALF) as first,
                decoding(client, prompts[0], HALF) as second,
            ):
                running = [asyncio.create_task(load(client, prompt, over)) for prompt in prompts]
                cluster.kill(name, signal.SIGTERM)
                ended = asyncio.to_thread(cluster.processes[name].wait, DRAIN_SECONDS)
                *rest, code = await asyncio.gather(first.text(), second.text(), ended)
            assert code == 0
            assert all(expected.endswith(text_in(each)) for each in rest)
            await client.gone(name)
            cluster.launch(name)
            await cluster.wait_nodes()
            over.set()
            await asyncio.gather(*running)
        await client.wait_idle()
        again = [line for line in cluster.log("router").splitlines() if '"placing a request again"' in line]
        # A node may begin to drain after the router has chosen it and before the request arrives. By then the prefill
        # node may already have sent the first token.
        assert all(json.loads(line)["tokens"] <= 1 for line in again), again
