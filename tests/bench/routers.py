"""Throughput of several router processes on one port, in requests and in streamed tokens per second.

    python -m tests.bench.routers [--processes 1 2 4 8 16] [--seconds 4] --json FILE

The routers are real processes that share a port. Each has a load process beside it, with a scripted prefill and decode
node that answer at once and with CLIENTS connections, which the kernel spreads over all routers. Loads are closed
loops: answers with one token, then streams of TOKENS tokens. Clients and nodes take processors, too, about half of what
the routers take, so on C cores throughput can grow up to some 2/3 C processes. Processor time is read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.config.router_processes import router_name
from tests.bench.environment import describe
from tests.bench.router_cost import cpu_seconds
from tests.bench.scripted_pair import ScriptedPair
from tests.bench.streaming import Stream, body
from tests.cluster.harness import ROOT, RunningCluster
from tests.fakes.waiting import PATIENCE

POOL_TOKENS = 1 << 24
MAX_MODEL_LEN = 4096
MODEL_NAME = "tiny"
CLIENTS = 48  # connections of each load process
TOKENS = 128  # of a stream
STEP_SECONDS = 0.002
WARM_SECONDS = 1.0
MAX_CONNECTIONS = 32_768  # connections and requests at once


@dataclass(frozen=True)
class Row:
    processes: int
    requests_per_s: float
    request_us: float  # processor time of all routers, per request with one token
    tokens_per_s: float
    token_us: float
    least_share: (
        float  # of the busiest router's time that the idlest one used: how evenly connections are spread
    )


@dataclass(frozen=True)
class Place:
    """Implements RouterPlace for a load process."""

    run_dir: Path
    processes: Mapping[str, Any]


@dataclass(frozen=True)
class _Process:
    pid: int


# -- one load process --------------------------------------------------------------------------------------------


async def closed_loop(port: int, tokens: int, stream: bool, seconds: float) -> int:
    """Return how many requests of CLIENTS connections have ended within `seconds`, after a warm-up."""
    begin = time.monotonic() + WARM_SECONDS
    end, done = begin + seconds, 0

    async def client() -> None:
        nonlocal done
        async with Stream(port) as connection:
            while time.monotonic() < end:
                connection.send(body(MODEL_NAME, tokens, stream))
                await asyncio.wait_for(connection.ended, PATIENCE)
                assert connection.status == 200, connection.status
                done += begin <= time.monotonic() < end

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return done


async def load(run_dir: Path, number: int, pid: int, port: int) -> None:
    """Follow the orders on the standard input: one JSON list of arguments of `closed_loop` per line."""
    router = router_name(number)
    place = Place(run_dir, {router: _Process(pid)})
    pair = ScriptedPair(
        place, (POOL_TOKENS, POOL_TOKENS), MAX_MODEL_LEN, STEP_SECONDS, number=number, router=router
    )
    async with pair:
        print("ready", flush=True)
        while order := await asyncio.to_thread(sys.stdin.readline):
            tokens, stream, seconds = json.loads(order)
            print(await closed_loop(port, tokens, stream, seconds), flush=True)


# -- all of them -------------------------------------------------------------------------------------------------


async def started(cluster: RunningCluster, number: int) -> asyncio.subprocess.Process:
    arguments = ("--load", str(cluster.run_dir), str(number))
    places = (str(cluster.processes[router_name(number)].pid), str(cluster.port))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.routers", *arguments, *places),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().strip()
    assert line, "a load process has ended"
    return line


async def run_loads(
    cluster: RunningCluster,
    loads: Sequence[asyncio.subprocess.Process],
    tokens: int,
    stream: bool,
    seconds: float,
) -> tuple[float, float, float]:
    """Return (requests per second, seconds of processor per request, `Row.least_share`) of one load."""
    pids = [cluster.processes[name].pid for name in cluster.router_names]
    for process in loads:
        assert process.stdin is not None
        process.stdin.write(json.dumps([tokens, stream, seconds]).encode() + b"\n")
    await asyncio.sleep(WARM_SECONDS)
    before = [cpu_seconds(pid) for pid in pids]
    await asyncio.sleep(seconds)
    spent = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
    done = sum([int(await said(process)) for process in loads])
    return done / seconds, sum(spent) / done, min(spent) / max(spent)


async def measure(processes: int, seconds: float) -> Row:
    limits = {
        "max_requests": MAX_CONNECTIONS,
        "max_connections": MAX_CONNECTIONS,
        "max_connections_per_client": MAX_CONNECTIONS,
    }
    config: dict[str, Any] = {
        "router": limits | {"queue_wait": 600.0, "processes": processes},
        "prefill": {"pool_tokens": POOL_TOKENS},
        "decode": {"pool_tokens": POOL_TOKENS, "max_running": 4096},
        "process": {"log_level": "warning"},
    }
    with tempfile.TemporaryDirectory() as directory:
        config["process"]["run_dir"] = f"/tmp/tandem-bench-{os.getpid()}-{processes}"
        cluster = RunningCluster(
            Path(directory), processes, processes, config, routers=processes, pool_tokens="auto"
        )
        loads: list[asyncio.subprocess.Process] = []
        try:
            for name in cluster.router_names:
                cluster.launch(name)
            await listening(cluster)
            loads = [await started(cluster, number) for number in range(processes)]
            for process in loads:
                assert await said(process) == "ready"
            requests, request_seconds, _ = await run_loads(cluster, loads, 1, False, seconds)
            streams, stream_seconds, share = await run_loads(cluster, loads, TOKENS, True, seconds)
        finally:
            for process in loads:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            cluster.stop()
    token_us = 1e6 * stream_seconds / TOKENS
    return Row(processes, requests, 1e6 * request_seconds, streams * TOKENS, token_us, share)


async def listening(cluster: RunningCluster) -> None:
    """Return once every router listens on the port."""
    deadline = time.monotonic() + PATIENCE
    port = ("127.0.0.1", cluster.port)
    while not all(port in cluster.listens_at(name) for name in cluster.router_names):
        assert time.monotonic() < deadline, "a router does not listen"
        await asyncio.sleep(0.2)


async def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for processes in options.processes:
        rows.append(await measure(processes, options.seconds))
        shown = (f"{name} {value:.4g}" for name, value in asdict(rows[-1]).items())
        print("  ".join(shown), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument(
        "--load", nargs=4, metavar=("RUN_DIR", "NUMBER", "PID", "PORT"), help=argparse.SUPPRESS
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.load is not None:
        run_dir, number, pid, port = options.load
        asyncio.run(load(Path(run_dir), int(number), int(pid), int(port)))
        return
    rows = asyncio.run(run(options))
    if options.json is not None:
        written = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(written, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
