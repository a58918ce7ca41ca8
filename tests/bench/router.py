"""The router's CPU time per request and per token and the latency it adds, beside another router in the same run.

    python -m tests.bench.router [--streams 1 10 100 1000] [--nodes 1 16] [--vllm-router PATH] --json FILE

All sizes, in some six minutes of an idle machine that allows 20,000 open files (ulimit -n):

    python -m tests.bench.router --streams 1 10 100 1000 --nodes 1 --seconds 5 --json streams.json
    python -m tests.bench.router --streams 100 1000 10000 --nodes 4 --requests-per-s 300 --json many-streams.json
    python -m tests.bench.router --streams 100 --nodes 4 16 128 --requests-per-s 500 --seconds 5 --json nodes.json

Both routers run as processes of their own, in front of scripted engines in this process that answer at once. tandem's
engines are a prefill and a decode node, which exchange control messages with the router; it turns tokens into text.
Those of vllm-router (PyPI; measured if the command is found) are HTTP servers that stream text, which it forwards.

For each number of streams, requests with one token each run in a closed loop, or arrive at random with
`--requests-per-s`, so that few and many nodes have the same load; then as many streams at once receive a token per
engine step, and with `--requests-per-s` requests arrive beside them, too. Steps are at least STEP_SECONDS apart, and
far enough to keep all streams together at `--rate` tokens per second. The CPU time of the router while nothing runs,
which goes to heartbeats, is shown, and left out of that of requests. CPU time is read from /proc, children included, so
that other work on the machine has little effect; the latency of a token, from the step that sent it to the client,
includes what this process costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from router.tokens.tokenizer import Tokenizer
from tests.bench.environment import describe
from tests.bench.raw_http import serving
from tests.bench.router_cost import cpu_seconds
from tests.bench.scripted_pair import ScriptedPair
from tests.bench.streaming import Stream, StreamingEngine, body
from tests.cluster.harness import MODEL, RunningCluster
from tests.fakes.waiting import PATIENCE

STEP_SECONDS = 0.01
MAX_MODEL_LEN = 4096
POOL_TOKENS = 1 << 24
REQUEST_SECONDS = 3.0
IDLE_LOOKS = 4  # seconds of an idle router; processes that it starts may be busy in the first ones
WARM_SECONDS = 1.0
AT_ONCE = 64  # connections that are opened together
START_SECONDS = 60.0
MODEL_NAME = "tiny"
MAX_CONNECTIONS = 32_768  # connections and requests at once
ROWS = 4096  # requests that decode on a node at once: as many as a cluster file permits
FIRST_ID = 260  # first of the tokens that are words or parts of words


@dataclass(frozen=True)
class Row:
    router: str
    nodes: int
    streams: int
    idle_ms_per_s: float  # CPU while there are no requests
    request_us: float  # CPU per request with one token, beyond that
    requests_per_s: float
    token_us: float  # CPU per streamed token
    tokens_per_s: float
    latency_ms: float  # median over tokens
    latency_p99_ms: float
    beside_us: float | None  # CPU per request that arrives while the streams are open, beyond theirs


@dataclass(frozen=True)
class Target:
    """A running router. `sent` returns when the latest token with a text was sent; each engine has its own texts."""

    name: str
    pid: int
    port: int
    engines: list[ScriptedPair] | list[StreamingEngine]
    sent: Callable[[str], float | None]


def texts() -> dict[str, int]:
    """Return words of the tiny model's vocabulary that JSON does not escape, and their ids."""
    tokenizer = Tokenizer(MODEL)
    words = {tokenizer.token_text(each): each for each in range(FIRST_ID, tokenizer.vocab_size)}
    return {text: each for text, each in words.items() if text.strip().isalpha() and text.isascii()}


@asynccontextmanager
async def tandem(nodes: int) -> AsyncGenerator[Target, None]:
    limits = {
        "max_requests": MAX_CONNECTIONS,
        "max_connections": MAX_CONNECTIONS,
        "max_connections_per_client": MAX_CONNECTIONS,
    }
    config = {"router": limits | {"queue_wait": 600.0}, "prefill": {"pool_tokens": POOL_TOKENS}}
    config["decode"] = {"pool_tokens": POOL_TOKENS, "max_running": ROWS}
    with tempfile.TemporaryDirectory() as directory:
        cluster = RunningCluster(Path(directory), nodes, nodes, config, pool_tokens="auto")
        cluster.launch("router")
        try:
            await serving(cluster)
            async with contextlib.AsyncExitStack() as stack:
                pools = (POOL_TOKENS, POOL_TOKENS)
                known = texts()
                pairs: list[ScriptedPair] = []
                owners: dict[str, ScriptedPair] = {}
                for at in range(nodes):
                    words = list(known)[at::nodes]
                    ids = [known[word] for word in words]
                    pair = ScriptedPair(cluster, pools, MAX_MODEL_LEN, number=at, ids=ids)
                    pairs.append(await stack.enter_async_context(pair))
                    owners |= dict.fromkeys(words, pair)
                router = cluster.processes["router"]
                yield Target(
                    "tandem",
                    router.pid,
                    cluster.port,
                    pairs,
                    lambda text: owners[text].sent.get(known[text]) if text in owners else None,
                )
        finally:
            cluster.stop()


@asynccontextmanager
async def vllm_router(command: str, nodes: int) -> AsyncGenerator[Target, None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        known = list(texts())
        engines: list[StreamingEngine] = []
        owners: dict[str, StreamingEngine] = {}
        for at in range(nodes):
            engine = StreamingEngine(known[at::nodes])
            engines.append(await stack.enter_async_context(engine))
            owners |= dict.fromkeys(engine.labels, engine)
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        options = [
            "--policy",
            "round_robin",
            "--log-level",
            "warning",
            "--max-concurrent-requests",
            str(MAX_CONNECTIONS),
        ]
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *(command, "--host", "127.0.0.1", "--port", str(port), *options, "--worker-urls", *urls),
                stdout=log,
                stderr=log,
            )
            try:
                deadline = time.monotonic() + START_SECONDS
                while not await _answers(port):
                    assert process.returncode is None, f"{command} ended with {process.returncode}"
                    assert time.monotonic() < deadline, f"{command} is not up after {START_SECONDS} s"
                    await asyncio.sleep(0.2)
                yield Target(
                    "vllm-router",
                    process.pid,
                    port,
                    engines,
                    lambda text: owners[text].sent.get(text) if text in owners else None,
                )
            finally:
                process.kill()
                await process.wait()


async def _answers(port: int) -> bool:
    try:
        async with Stream(port) as stream:
            stream.send(body(MODEL_NAME, 1, stream=False))
            await asyncio.wait_for(stream.ended, PATIENCE)
    except OSError:
        return False
    return stream.status == 200


@dataclass(frozen=True)
class RequestCost:
    us: float  # CPU microseconds per request, beyond what the router spends without them
    per_s: float  # requests


class Clients:
    """Sends requests with one token. Every connection is used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Stream] = []
        self._open = contextlib.AsyncExitStack()
        self.done = 0

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def request(self) -> None:
        stream = self._free.pop() if self._free else await self._open.enter_async_context(Stream(self._port))
        stream.send(body(MODEL_NAME, 1, stream=False))
        await asyncio.wait_for(stream.ended, PATIENCE)
        assert stream.status == 200, stream.status
        self._free.append(stream)
        self.done += 1

    async def closed_loop(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.request()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def arrivals(self, per_s: float, seconds: float) -> None:
        """Send requests at random times, whether or not earlier ones are answered."""
        due, draw = time.monotonic(), random.Random(1)
        end = due + seconds
        async with asyncio.TaskGroup() as running:
            while due < end:
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                running.create_task(self.request())
                due += draw.expovariate(per_s)


async def idle_cost(pid: int) -> float:
    """Return the CPU time of a router without requests, in seconds per second: the least of several seconds."""
    spent = [cpu_seconds(pid)]
    for _ in range(IDLE_LOOKS):
        await asyncio.sleep(1)
        spent.append(cpu_seconds(pid))
    return min(after - before for before, after in pairwise(spent))


async def request_cost(target: Target, clients: int, per_s: float | None, idle: float) -> RequestCost:
    """Return the cost of requests with one token: of a closed loop, or of arrivals if `per_s` is given.

    `idle`: seconds of CPU that the router spends per second without them.
    """
    async with Clients(target.port) as sending:

        async def load(seconds: float) -> None:
            if per_s is None:
                await sending.closed_loop(clients, seconds)
            else:
                await sending.arrivals(per_s, seconds)

        await load(WARM_SECONDS)
        before, begun, sending.done = cpu_seconds(target.pid), time.monotonic(), 0
        await load(REQUEST_SECONDS)
        spent, seconds = cpu_seconds(target.pid) - before, time.monotonic() - begun
        return RequestCost(1e6 * (spent - idle * seconds) / sending.done, sending.done / seconds)


async def measure(
    target: Target, streams: int, rate: float, seconds: float, requests_per_s: float | None
) -> Row:
    idle = await idle_cost(target.pid)
    for engine in target.engines:
        engine.step_seconds = 0.001
    request = await request_cost(target, min(streams, AT_ONCE), requests_per_s, idle)
    step = max(STEP_SECONDS, streams / rate)
    for engine in target.engines:
        engine.step_seconds = step
    beside_seconds = 0.0 if requests_per_s is None else WARM_SECONDS + REQUEST_SECONDS
    tokens = min(int((seconds + WARM_SECONDS + beside_seconds) / step) * 2 + 64, MAX_MODEL_LEN - 64)
    async with contextlib.AsyncExitStack() as stack:
        opened: list[Stream] = []
        for start in range(0, streams, AT_ONCE):
            some = [Stream(target.port, target.sent) for _ in range(start, min(start + AT_ONCE, streams))]
            await asyncio.gather(*(stack.enter_async_context(each) for each in some))
            for each in some:
                each.send(body(MODEL_NAME, tokens))
            opened += some
        for each in opened:
            await asyncio.wait_for(each.begun, PATIENCE)
            assert each.status == 200, each.status
        await asyncio.sleep(WARM_SECONDS)
        before, begun = cpu_seconds(target.pid), time.monotonic()
        for each in opened:
            each.delays.clear()
        await asyncio.sleep(seconds)
        spent, passed = cpu_seconds(target.pid) - before, time.monotonic() - begun
        delays = sorted(1e3 * delay for each in opened for delay in each.delays)
        beside = None
        if requests_per_s is not None:
            beside = (await request_cost(target, 0, requests_per_s, spent / passed)).us
        assert not any(each.ended.done() for each in opened), "a stream ended during the measurement"
    return Row(
        target.name,
        len(target.engines),
        streams,
        1e3 * idle,
        request.us,
        request.per_s,
        1e6 * spent / len(delays),
        len(delays) / passed,
        statistics.median(delays),
        delays[int(0.99 * (len(delays) - 1))],
        beside,
    )


async def run(options: argparse.Namespace) -> list[Row]:
    rows = []
    command = shutil.which(options.vllm_router)
    if command is None:
        print(f"{options.vllm_router} is not installed: only tandem is measured")
    for nodes in options.nodes:
        for streams in options.streams:
            targets = [tandem(nodes)] + ([] if command is None else [vllm_router(command, nodes)])
            for target in targets:
                async with target as running:
                    rows.append(
                        await measure(running, streams, options.rate, options.seconds, options.requests_per_s)
                    )
                    shown = "  ".join(
                        f"{name} {value:.4g}" if isinstance(value, float) else str(value)
                        for name, value in asdict(rows[-1]).items()
                        if value is not None
                    )
                    print(shown, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1], help="engines behind the router")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens per second over all streams")
    parser.add_argument(
        "--requests-per-s", type=float, metavar="R", help="arrivals of requests, instead of a closed loop"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of tokens")
    parser.add_argument("--vllm-router", default="vllm-router", metavar="PATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if max(options.streams) > ROWS * min(options.nodes):
        parser.error(
            f"--streams: a node takes at most {ROWS}; the others would wait for room: use more --nodes"
        )
    rows = asyncio.run(run(options))
    if options.json is not None:
        written = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(written, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
