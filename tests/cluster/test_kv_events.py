"""KV events on real processes: a subscriber hears them, and a router that was just started places prompts by them."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from common.kv_events.wire import SNAPSHOT, BlockStored, decode
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.test_faults import streaming
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 200
BLOCK = 64
PLACEMENT = {"prefill": "cache_events", "decode": "cache_events"}


def hold_ports(count: int) -> list[socket.socket]:
    """Bind some consecutive ports, which a server that reuses addresses can bind, too."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        with ExitStack() as opened:
            held = [opened.enter_context(socket.socket()) for _ in range(count)]
            try:
                for port, each in enumerate(held, first):
                    each.bind(("127.0.0.1", port))
                    # Not before: two sockets that both reuse addresses could hold one port.
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError:
                continue
            opened.pop_all()
            return held
    raise AssertionError("no free ports")


async def series(client: Client) -> dict[str, float]:
    async with client.session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {sample.name: sample.value for family in families for sample in family.samples}


async def followed(client: Client, nodes: int, blocks: int) -> None:
    """Wait until the router has heard all nodes and knows at least this many blocks."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = await series(client)
        known = found["tandem_placement_followed_nodes"], found["tandem_placement_known_blocks"]
        if known[0] == nodes and known[1] >= blocks:
            return
        assert time.monotonic() < deadline, known
        await asyncio.sleep(0.05)


async def counted(client: Client, kind: str, tokens: int) -> None:
    """Wait until the router has counted so many tokens that are cached on chosen nodes, and expect no more."""
    name = f"tandem_placement_{kind}_cached_tokens_total"
    async with asyncio.timeout(PATIENCE):
        while (found := (await series(client))[name]) < tokens:
            await asyncio.sleep(0.02)
    assert found == tokens


def snapshot(address: str) -> list[BlockStored]:
    """Return the blocks that a node holds, as any program can ask for them."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(address)
        asking.send(SNAPSHOT.to_bytes(8, "big"))
        assert asking.poll(int(PATIENCE * 1000))
        _, _, payload = asking.recv_multipart()
    return [event for event in decode(payload).events if isinstance(event, BlockStored)]


async def test_a_router_that_starts_later_knows_what_nodes_hold(tmp_path: Path) -> None:
    held_ports = hold_ports(6)
    first = held_ports[0].getsockname()[1]
    config = {
        "kv_events": {"enabled": True, "first_port": first, "first_replay_port": first + 3},
        "router": {"placement": PLACEMENT},
    }
    prompts = [[100 * number + 3 * at % 97 for at in range(TOKENS)] for number in range(1, 5)]
    whole = TOKENS // BLOCK
    made = RunningCluster(tmp_path, 2, 1, config, held=held_ports, withholding=("decode-0",))
    async with made as cluster:
        async with Client(cluster.url) as client:
            await followed(client, 3, 0)
            for prompt in prompts:
                await client.complete(prompt, 2)
                await client.wait_idle()
            await followed(client, 3, 2 * len(prompts) * whole)
            nodes = [await client.node(f"prefill-{index}") for index in range(2)]
        assert all(node["counters"]["requests"] for node in nodes), "idle nodes take turns"
        held = [await asyncio.to_thread(snapshot, node["config"]["kv_events_replay"]) for node in nodes]
        assert sum(len(event.block_hashes) for events in held for event in events) == len(prompts) * whole
        cluster.kill("router")
        cluster.launch("router")
        await cluster.wait_nodes()
        async with Client(cluster.url) as client:
            # Nothing but events can have told the new router.
            await followed(client, 3, 2 * len(prompts) * whole)
            for number, prompt in enumerate(prompts, 1):
                # The router counts what the prefill node reports before the end of the answer, which is withheld.
                headers = {"X-Request-Id": f"hold-1-{number}"}
                body = streaming([*prompt, 5], 24)
                async with client.session.post("/v1/completions", json=body, headers=headers):
                    await counted(client, "expected", number * whole * BLOCK)
            await counted(client, "found", len(prompts) * whole * BLOCK)
