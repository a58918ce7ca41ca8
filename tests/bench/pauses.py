"""Pauses of the router's event loop while a crowd of streams is open, and what they come from.

    python -m tests.bench.pauses [--only poisson crowd ...] [--streams 600] [--seconds 20] [--json FILE]

A real router process with the probe of loop_probe.py serves scripted nodes (tests/bench/scripted_pair.py). A pause is a
stall in which the loop's thread computed for at least 5 ms: other processes of the machine and the hypervisor make
stalls, too, but no computation. Each is shown with its garbage collections and the stack of the thread.

    poisson     32 prompts of 1,024 token ids per second, 256 answer tokens each
    crowd       `--streams` clients with prompts of 3,000 token ids and 40 answer tokens, one every 0.25 s
    texts       the same of texts of 4 KB
    operator    64 streams while /metrics, /server_info and /requests are read all the time
    whole       answers that are not streamed, with log-probabilities, 2,000 tokens each, 16 at a time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.environment import describe
from tests.bench.loop_probe import Stall, stalls
from tests.bench.raw_http import RawClient, serving
from tests.bench.scripted_pair import ScriptedPair
from tests.bench.streaming import Stream
from tests.cluster.harness import RunningCluster

PAUSE = 0.005  # seconds of computation
POOL_TOKENS = 1 << 24
MAX_MODEL_LEN = 4096
STEP_SECONDS = 0.007
CROWD_STEP_SECONDS = 0.25
MAX_CONNECTIONS = 8192  # requests and connections
PATIENCE = 300.0  # seconds
SHOWN = 12
SETTLE_SECONDS = 5.0  # for collections after a load


@dataclass(frozen=True)
class Load:
    """A running router under one load."""

    port: int
    pair: ScriptedPair
    streams: int
    seconds: float

    async def stream(self, prompt: Any, tokens: int, **fields: Any) -> None:
        """Send a streamed completion and read it to its end."""
        async with Stream(self.port) as stream:
            stream.send(
                {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
            )
            await asyncio.wait_for(stream.ended, PATIENCE)
            assert stream.status == 200, stream.status

    async def until_over(self, one: Callable[[], Awaitable[object]], clients: int) -> None:
        """Let each of `clients` repeat a request until the time is over."""
        end = time.monotonic() + self.seconds

        async def client() -> None:
            while time.monotonic() < end:
                await one()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())


def ids(count: int) -> list[int]:
    return random.choices(range(300, 700), k=count)


async def poisson(load: Load) -> None:
    """Open an open loop of 32 requests per second."""
    due = start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while due < start + load.seconds:
            due += random.expovariate(32)
            await asyncio.sleep(due - time.monotonic())
            group.create_task(load.stream(ids(1024), 256))


async def crowd(load: Load, prompt: Callable[[], Any] = lambda: ids(3000)) -> None:
    """Begin all streams within 5 s; a stream that ends is followed by another one."""
    load.pair.step_seconds = CROWD_STEP_SECONDS

    async def one() -> None:
        await asyncio.sleep(5 * random.random())
        await load.stream(prompt(), 40)

    await load.until_over(one, load.streams)


async def texts(load: Load) -> None:
    await crowd(load, lambda: " ".join(random.choices(("apple", "pear", "plum"), k=800)))


async def operator(load: Load) -> None:
    """Read what operators read, while 64 streams run."""

    async def read(path: str) -> None:
        async with RawClient(load.port) as client:
            end = time.monotonic() + load.seconds
            while time.monotonic() < end:
                assert await client.get(path) == 200, path
                await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for path in ("/metrics", "/server_info", "/requests?limit=200"):
            group.create_task(read(path))
        group.create_task(load.until_over(lambda: load.stream(ids(64), 200), 64))


async def whole(load: Load) -> None:
    """Ask for whole answers with log-probabilities."""

    async def one() -> None:
        async with RawClient(load.port) as client:
            body = {"prompt": ids(64), "max_tokens": 2000, "ignore_eos": True, "logprobs": 5}
            assert await client.post("/v1/completions", body) == 200

    load.pair.tokens_per_step = 16
    await load.until_over(one, 16)


LOADS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "poisson": poisson,
    "crowd": crowd,
    "texts": texts,
    "operator": operator,
    "whole": whole,
}


def shown(stall: Stall, since: float) -> str:
    collected = "".join(f", generation {each} {1e3 * cpu:.1f} ms" for each, cpu in stall.collections)
    return f"  {stall.since - since:6.2f} s: {1e3 * stall.cpu:.1f} ms{collected}; {' < '.join(stall.stack[:-5:-1])}"


async def measured(name: str, streams: int, seconds: float) -> dict[str, Any]:
    limits = {
        "max_requests": MAX_CONNECTIONS,
        "max_connections": MAX_CONNECTIONS,
        "max_connections_per_client": MAX_CONNECTIONS,
    }
    config: dict[str, Any] = {"router": limits, "prefill": {"pool_tokens": POOL_TOKENS}}
    config["decode"] = {"pool_tokens": POOL_TOKENS, "max_running": 4096}
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "stalls.jsonl"
        module = ("tests.bench.loop_probe", str(probe))
        cluster = RunningCluster(Path(directory), config=config, router_module=module, pool_tokens="auto")
        cluster.launch("router")
        try:
            await serving(cluster)
            pools = (POOL_TOKENS, POOL_TOKENS)
            async with ScriptedPair(cluster, pools, MAX_MODEL_LEN, STEP_SECONDS) as pair:
                since = time.monotonic()
                await LOADS[name](Load(cluster.port, pair, streams, seconds))
                loaded = time.monotonic()
                await asyncio.sleep(SETTLE_SECONDS)
                found = [each for each in stalls(probe, since, time.monotonic()) if each.cpu >= PAUSE]
        finally:
            cluster.stop()
    found.sort(key=lambda each: -each.cpu)
    print(f"{name}: {len(found)} pauses, {sum(each.since > loaded for each in found)} of them after the load")
    for each in found[:SHOWN]:
        print(shown(each, since), flush=True)
    by_cause = {"collections": [each for each in found if each.collections]}
    by_cause["others"] = [each for each in found if not each.collections]
    return {
        "load": name,
        "pauses": {cause: len(each) for cause, each in by_cause.items()},
        "longest_ms": {
            cause: round(1e3 * max((stall.cpu for stall in each), default=0.0), 1)
            for cause, each in by_cause.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(LOADS))
    parser.add_argument("--streams", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [asyncio.run(measured(name, given.streams, given.seconds)) for name in given.only or LOADS]
    if given.json:
        given.json.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
