"""Measures whether the router's memory stays constant: many small completions, then unknown ids of every kind.

    python -m tests.bench.router_soak --json FILE

A real router process serves scripted nodes (tests/bench/scripted_pair.py) over its ipc socket. First it gets
`--requests` completions of two tokens over HTTP, from text and token ids, streamed and not, each with its own
X-Request-Id. Then it gets `--ids` ids of each kind of UNKNOWN. The router's resident memory, descriptors and threads
are sampled all the time, until the router has returned the memory of ended connections. Printed are their growth after
the first WARM_UP requests or ids of a load (or after half of it, if that is less), the slope in bytes per request or
id, and by how much the largest sample exceeded the first one after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from common.ipc.session import FrameKind, frame
from common.messages.generation import OutputToken
from common.messages.identity import NodeCounters, NodeLoad, new_incarnation
from common.messages.router_inbox import Failed, FirstToken, Heartbeat, PrefillDone, TokenRun, Tokens
from common.messages.wire import encode
from router.process.freed_memory import TRIM_SECONDS
from tests.bench.environment import describe
from tests.bench.raw_http import RawClient, serving
from tests.bench.scripted_pair import ScriptedPair
from tests.bench.soak_samples import Watch, growth
from tests.cluster.harness import RunningCluster
from tests.fakes.fake_node import registration

WARM_UP = 10_000  # more entries than any table of the router holds
SOCKETS_AT_ONCE = 100
POOLS = (32_768, 65_536)
MAX_MODEL_LEN = 4096
SETTLE_SECONDS = 3.0  # for input still to be read after a load, and for the sweep that trims the heap
MESSAGES_AT_ONCE = 50  # then a pause: the router reads some hundred per turn of its loop
FORMS = [(prompt, stream) for prompt in ("How many are 3 and 4?", [5, 6, 7, 8]) for stream in (False, True)]


class Soak:
    """One router and the load on it. `done` counts within a load."""

    def __init__(self, cluster: RunningCluster, pair: ScriptedPair, clients: int) -> None:
        self._cluster = cluster
        self._pair = pair
        self._clients = clients
        self._rng = random.Random(1)  # no name occurs twice
        self.done = 0
        self.statuses: Counter[int] = Counter()

    async def run(self, load: Callable[[int], Awaitable[None]], count: int) -> dict[str, Any]:
        self.done, self.statuses = 0, Counter()
        started = time.monotonic()
        async with Watch(self._cluster.processes["router"].pid, lambda: self.done) as watch:
            await load(count)
            seconds = time.monotonic() - started
            await asyncio.sleep(TRIM_SECONDS + SETTLE_SECONDS)
        return {
            **growth(watch.samples, min(WARM_UP, count // 2)),
            "count": count,
            "seconds": round(seconds, 1),
            "statuses": dict(self.statuses),
            "log_kib": (self._cluster.directory / "router.log").stat().st_size // 1024,
        }

    async def completions(self, count: int) -> None:
        """Send requests, all of which must be answered."""

        async def one(client: RawClient, number: int) -> int:
            prompt, stream = FORMS[number % len(FORMS)]
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": stream}
            status = await client.post("/v1/completions", body, f"X-Request-Id: soak-{number}\r\n")
            assert status == 200, status
            return status

        await self._http(count, one)

    async def timelines(self, count: int) -> None:
        await self._http(count, lambda client, number: client.get(f"/requests/{self._name()}"))

    async def request_ids(self, count: int) -> None:
        def one(client: RawClient, number: int) -> Awaitable[int]:
            return client.post("/v1/completions", {"prompt": 5}, f"X-Request-Id: {self._name()}\r\n")

        await self._http(count, one)

    async def models(self, count: int) -> None:
        def one(client: RawClient, number: int) -> Awaitable[int]:
            if number % 2:
                return client.get(f"/v1/models/{self._name()}")
            return client.post("/v1/completions", {"prompt": [5], "model": self._name()})

        await self._http(count, one)

    async def routes(self, count: int) -> None:
        await self._http(count, lambda client, number: client.get(f"/{self._name()}?{self._name()}=1"))

    async def addresses(self, count: int) -> None:
        """Send a completion from each of `count` addresses of 127.0.0.0/8."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                packed = (2 << 16) + number
                address = f"127.{packed >> 16 & 255}.{packed >> 8 & 255}.{packed & 255}"
                async with RawClient(self._cluster.port, address) as each:
                    body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
                    self._answered(await each.post("/v1/completions", body))

        await asyncio.gather(*(client() for _ in range(self._clients)))

    async def rooms(self, count: int) -> None:
        """Send messages about unknown rooms, from registered nodes."""
        for number in range(count):
            room = self._rng.getrandbits(62) + 1
            token = OutputToken(7)
            kind = number % 4
            if kind == 0:
                self._pair.decode.say(Tokens(runs=[TokenRun(room, 0, [token], "stop", {"decoded": 0.1})]))
            elif kind == 1:
                self._pair.prefill.say(Failed(room=room, code="node_lost", message="gone"))
            elif kind == 2:
                self._pair.prefill.say(PrefillDone(room=room, stages={"computed": 0.1}))
            else:
                first = FirstToken(room=room, token=token, finish_reason=None, cached_tokens=0)
                self._pair.prefill.say(first)
            await self._said()

    async def routing_ids(self, count: int) -> None:
        """Send a session and a refused registration on `count` connections."""

        def register() -> tuple[str, list[tuple[bytes, ...]]]:
            message = registration("decode", self._name())
            return message.link_id(), _session_frames(encode(message))

        await self._strangers(count, register)

    async def malformed_routing_ids(self, count: int) -> None:
        """Connect with invalid routing ids; each of their frames counts as bad."""

        def babble() -> tuple[str, list[tuple[bytes, ...]]]:
            return self._name(), _session_frames(b"nothing")

        await self._strangers(count, babble)

    async def incarnations(self, count: int) -> None:
        """Send heartbeats of processes that never registered, each on a connection of its own."""

        def beat() -> tuple[str, list[tuple[bytes, ...]]]:
            incarnation = new_incarnation()
            message = Heartbeat(
                incarnation=incarnation,
                sequence=1,
                state="up",
                loop_age_ms=0,
                as_of=time.time(),
                load=NodeLoad(),
                counters=NodeCounters(),
            )
            return f"decode-0/{incarnation}", [(encode(message),)]

        await self._strangers(count, beat)

    async def _strangers(self, count: int, make: Callable[[], tuple[str, list[tuple[bytes, ...]]]]) -> None:
        """Send frames from many sockets: `make` returns a routing id and what its socket sends before it closes."""
        for _ in range(0, count, SOCKETS_AT_ONCE):
            context = zmq.Context[zmq.Socket[bytes]]()
            for _ in range(SOCKETS_AT_ONCE):
                identity, messages = make()
                with context.socket(zmq.DEALER) as stranger:
                    stranger.setsockopt(zmq.LINGER, 5000)
                    stranger.setsockopt(zmq.IDENTITY, identity.encode())
                    stranger.connect(self._pair.address)
                    for parts in messages:
                        stranger.send_multipart(parts)
                await self._said()
            await asyncio.to_thread(context.term)  # returns once all is sent and the sockets are closed

    async def _http(self, count: int, one: Callable[[RawClient, int], Awaitable[int]]) -> None:
        numbers = iter(range(count))

        async def client() -> None:
            async with RawClient(self._cluster.port) as connected:
                for number in numbers:
                    self._answered(await one(connected, number))

        await asyncio.gather(*(client() for _ in range(self._clients)))

    def _answered(self, status: int) -> None:
        self.statuses[status] += 1
        self.done += 1

    async def _said(self) -> None:
        self.done += 1
        if self.done % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0.005)

    def _name(self) -> str:
        return f"unknown-{self._rng.getrandbits(64):x}"


UNKNOWN: dict[str, Callable[[Soak, int], Awaitable[None]]] = {
    "GET /requests/ID": Soak.timelines,
    "X-Request-Id of refused requests": Soak.request_ids,
    "models": Soak.models,
    "routes": Soak.routes,
    "client addresses": Soak.addresses,
    "rooms": Soak.rooms,
    "node names, sessions and routing ids": Soak.routing_ids,
    "routing ids of no known form": Soak.malformed_routing_ids,
    "incarnations": Soak.incarnations,
}


def _session_frames(payload: bytes) -> list[tuple[bytes, ...]]:
    """Return frames that open a session and send one message in it."""
    epoch = secrets.randbits(63)
    return [frame(FrameKind.OPEN, epoch, 0, 0), frame(FrameKind.DATA, epoch, 1, 0, payload)]


async def _metrics_size(cluster: RunningCluster) -> int:
    async with cluster.operator() as client, client.session.get("/metrics") as response:
        return len(await response.read())


async def measure(requests: int, ids: int, clients: int, only: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        cluster = RunningCluster(Path(directory), pool_tokens="auto")
        cluster.launch("router")
        try:
            await serving(cluster)
            async with ScriptedPair(cluster, POOLS, MAX_MODEL_LEN) as pair:
                soak = Soak(cluster, pair, clients)
                loads: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {}
                if requests:
                    loads["completions"] = (soak.completions, requests)
                for name in only or UNKNOWN:
                    loads[name] = (partial(UNKNOWN[name], soak), ids)
                for name, (load, count) in loads.items():
                    results[name] = await soak.run(load, count)
                    results[name]["metrics_bytes"] = await _metrics_size(cluster)
                    print(name, json.dumps(results[name]), flush=True)
        finally:
            cluster.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--ids", type=int, default=20_000, help="of each kind")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[], choices=list(UNKNOWN))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = asyncio.run(measure(given.requests, given.ids, given.clients, given.only))
    if given.json:
        given.json.write_text(json.dumps({"environment": describe(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
