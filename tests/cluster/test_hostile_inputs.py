"""Input made to break a process, sent to every port of a serving cluster: no process ends, and streams continue.

Model files are read only at start-up: tests/unit/engine/test_hostile_models.py. Request bodies and stalls of the
router's event loop: tests/bench/router_hostile.py. Gaps in the streams meanwhile: tests/bench/cluster_hostile.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from common.ipc import Dealer
from router.control_plane import PEER_CUT_OFF
from tests.cluster.attacks import (
    FRAMES_OF_A_PROCESS,
    STOLEN,
    TEMPLATES,
    Memory,
    Thief,
    config,
    image_urls,
    raw,
    send_bytes,
)
from tests.cluster.harness import Client, RunningCluster, hold_port
from tests.fakes import hostile_frames, hostile_images
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores

MAX_GROWTH_MIB = 100
STREAMS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "How many apples are 3 and 4 apples?"}], "max_tokens": 300},
    {
        "messages": [{"role": "user", "content": "Name all the colours."}],
        "max_tokens": 60,
        "seed": 7,
        "temperature": 1,
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": hostile_images.url(hostile_images.file())}},
                    {"type": "text", "text": "What do you see?"},
                ],
            }
        ],
        "max_tokens": 20,
    },
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A model that accepts pictures, over TCP with keys. The node whose key is stolen does not run."""
    directory = tmp_path_factory.mktemp("attacked")
    with hold_port() as bulk:
        port = int(bulk.getsockname()[1])
        cluster = RunningCluster(directory, 1, 2, config(directory, port), late=(STOLEN,))
        cluster.addresses["decode-0"] = port
        with cluster:
            yield cluster


async def stream(client: Client, body: dict[str, Any]) -> list[Any]:
    """Return the tokens of a streamed chat, and how it ended."""
    body = {"temperature": 0, "ignore_eos": True, "logprobs": True, **body, "stream": True}
    async with client.session.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]", text[-500:]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    tokens = [
        token["token"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]
    ]
    return [*tokens, choices[-1]["finish_reason"]]


async def served_meanwhile(client: Client, attack: Callable[[], Awaitable[None]]) -> None:
    """Expect that every stream during the attack, and one after it, has the same tokens as before."""
    expected = [await stream(client, body) for body in STREAMS]
    over = asyncio.Event()

    async def again(body: dict[str, Any], tokens: list[Any]) -> None:
        last = False
        while not last:
            last = over.is_set()
            assert await stream(client, body) == tokens

    running = [asyncio.create_task(again(*each)) for each in zip(STREAMS, expected, strict=True)]
    try:
        await attack()
    finally:
        over.set()
        await asyncio.wait_for(asyncio.gather(*running), PATIENCE)


def expect_unharmed(cluster: RunningCluster, memory: Memory) -> None:
    for name, process in cluster.processes.items():
        assert process.poll() is None, f"{name} has ended:\n{cluster.log(name)[-3000:]}"
        assert "Traceback" not in cluster.log(name)
    assert '"node lost"' not in cluster.log("router")
    growth = memory.growth()
    assert max(growth.values()) < MAX_GROWTH_MIB, growth


async def test_bytes_at_every_port_of_a_node(attacked: RunningCluster) -> None:
    """Random, truncated and oversized bytes, and beginnings of the protocols, without a key."""
    rng = random.Random(5)
    ports = [attacked.addresses[name] for name in ("router", "prefill-0", "decode-0")]

    async def attack() -> None:
        await send_bytes(ports, hostile_frames.byte_streams(rng))

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)


async def refused(client: Client, server: str) -> int:
    """Return how many messages the router or a node has refused."""
    if server == "router":
        counted: int = (await client.info())["refused_messages"]
    else:
        counted = (await client.node(server))["counters"]["refused_messages"]
    return counted


async def test_frames_with_a_stolen_key(attacked: RunningCluster) -> None:
    """Frames that belong to no session, and sessions with bad payloads, are counted by router and prefill node."""
    rng = random.Random(6)
    payloads = {
        "router": list(hostile_frames.packed(rng)),
        "prefill-0": list(hostile_frames.peer_messages(rng)),
    }

    async def attack_one(client: Client, server: str) -> None:
        frames, lies = list(hostile_frames.zmq_messages(rng)), payloads[server]
        before = await refused(client, server)
        with Thief(attacked, server) as thief:
            thief.send(frames, raw, FRAMES_OF_A_PROCESS)
            thief.send(list(hostile_frames.session_frames(rng)), raw, FRAMES_OF_A_PROCESS)
            thief.send(lies, Dealer.send, FRAMES_OF_A_PROCESS)

            async def counted() -> bool:
                return await refused(client, server) - before > len(lies) // 2

            await thief.stay_until(counted)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)

        async def attack() -> None:
            for server in payloads:
                await attack_one(client, server)

        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)
    assert PEER_CUT_OFF not in attacked.log("router"), "the test meant to stay below the limit"


async def test_a_flood_of_frames_with_a_stolen_key_is_cut_off(attacked: RunningCluster) -> None:
    rng = random.Random(7)
    flood = [[b"", rng.randbytes(rng.choice((10, 100, 5_000))), b""] for _ in range(1_000)]

    def cut_off() -> set[str]:
        lines = [json.loads(line) for line in attacked.log("router").splitlines() if PEER_CUT_OFF in line]
        return {line["peer"].partition("/")[0] for line in lines}

    async def in_log() -> bool:
        return STOLEN in cut_off()

    async def attack() -> None:
        with Thief(attacked, "router") as thief:
            thief.send(flood, raw, len(flood))
            await thief.stay_until(in_log)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    # or a key: what came on its connection once the key was refused
    assert all(culprit.startswith("key ") for culprit in cut_off() - {STOLEN})
    expect_unharmed(attacked, memory)


async def _ask(session: aiohttp.ClientSession, content: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.text()


async def test_images_and_templates(attacked: RunningCluster) -> None:
    """Each bad input is refused with 400, or with 503 if it killed its worker; the next one finds a new worker."""

    async def attack() -> None:
        async with aiohttp.ClientSession(attacked.url) as session:
            for name, address in (await asyncio.to_thread(image_urls)).items():
                part = {"type": "image_url", "image_url": {"url": address}}
                status, text = await _ask(session, [part, {"type": "text", "text": "What is it?"}])
                assert status == 400, (name, text)
                assert json.loads(text)["error"]["param"] == "messages[0].content[0].image_url", (name, text)
            for number, source in enumerate(TEMPLATES):
                status, text = await _ask(session, f"attack {number}")
                assert status in (400, 503), (source, text)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)
