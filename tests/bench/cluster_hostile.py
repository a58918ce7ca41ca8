"""The effect of attackers at every port on the streams and the memory of a cluster that serves other clients.

    python -m tests.bench.cluster_hostile [--json FILE] [--repeat 3] [--only NAME ...]

One prefill and one decode node with keys over TCP, a model that takes pictures, and TLS. Streams run all the time; each
attack of cluster_attackers.py runs in a process of its own with low priority, as if on another machine, and follows an
undisturbed phase. `gaps` are the times in milliseconds between two pieces of a stream at the client, `quiet` those of
the undisturbed phase: what both have in common is the machine. `client_late` is the longest delay of the clients' own
event loop in that phase. `stall_ms` is the longest stall of the router's event loop without the time in which other
processes had the processor (loop_probe.py). `grown_mib` is the peak of the resident memory of a process, or of one of
its children, over its value before the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.cluster_attackers import ATTACKS, BULK, Place
from tests.bench.environment import ROOT, describe
from tests.bench.loop_probe import LoopProbe, stalls
from tests.cluster.attacks import STOLEN, Memory, config
from tests.cluster.harness import ENV, Client, RunningCluster, hold_port
from tests.fakes.tls_files import AUTHORITY, copy_certificates

STREAMS = 4
TOKENS = 300
WARM_UP_SECONDS = 20.0  # the nodes grow while they serve their first requests
QUIET_SECONDS = 8.0
SETTLE_SECONDS = 0.5
ATTACK_SECONDS = 120.0
NICE = 10  # for attackers: they get a tenth of the processors that the cluster wants


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two pieces of one stream."""

    until: float  # monotonic
    seconds: float


class Streams:
    """Streams of other clients, one after the other on each of STREAMS connections. Use it as an async context."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._gaps: list[Gap] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(STREAMS)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, since: float, until: float) -> dict[str, float]:
        """Percentiles of the gaps that ended in an interval. Raises the error of a stream that failed."""
        for task in self._tasks:
            if task.done():
                task.result()
        found = sorted(1000 * gap.seconds for gap in self._gaps if since <= gap.until <= until)
        self._gaps = [gap for gap in self._gaps if gap.until > until]
        return {
            "pieces": len(found),
            "p50": round(found[len(found) // 2], 1),
            "p99": round(found[len(found) * 99 // 100], 1),
            "max": round(found[-1], 1),
            "over_50_ms": sum(each > 50.0 for each in found),
        }

    async def _run(self, number: int) -> None:
        content = f"How many apples are {number + 3} and 4 apples?"
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            async with self._client.session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                before: float | None = None
                async for _ in response.content.iter_any():
                    now = time.monotonic()
                    if before is not None:
                        self._gaps.append(Gap(now, now - before))
                    before = now


async def attacked(place: Place, name: str) -> Any:
    """Run an attack in a process of its own. Return what the attackers saw."""
    process = await asyncio.create_subprocess_exec(
        *("nice", "-n", str(NICE), sys.executable, "-m", "tests.bench.cluster_attackers"),
        *(msgspec.json.encode(place).decode(), name),
        cwd=ROOT,
        env=ENV,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(ATTACK_SECONDS):
        printed, _ = await process.communicate()
    assert process.returncode == 0, name
    return json.loads(printed)


@dataclass(frozen=True, slots=True)
class Probes:
    """Files of the probes of two event loops."""

    router: Path
    client: Path

    def late_ms(self, since: float, until: float) -> float:
        """The longest delay of the clients' own event loop: no gap below it says anything about the cluster."""
        return round(1000 * max((each.late for each in stalls(self.client, since, until)), default=0.0), 1)


async def measured(
    cluster: RunningCluster, place: Place, streams: Streams, probes: Probes, name: str
) -> dict[str, Any]:
    quiet_since = time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    memory, since = Memory(cluster), time.monotonic()
    quiet = streams.gaps(quiet_since, since) | {"client_late": probes.late_ms(quiet_since, since)}
    saw = await attacked(place, name)
    await asyncio.sleep(SETTLE_SECONDS)
    until = time.monotonic()
    for process, running in cluster.processes.items():
        assert running.poll() is None, f"{process} has ended:\n{cluster.log(process)[-3000:]}"
    found = stalls(probes.router, since, until)
    return {
        "attack": name,
        **saw,
        "seconds": round(until - since, 1),
        "quiet": quiet,
        "gaps": streams.gaps(since, until) | {"client_late": probes.late_ms(since, until)},
        "stall_ms": round(1000 * found[0].seconds, 1) if found else 0.0,
        "late_ms": round(1000 * max((each.late for each in found), default=0.0), 1),
        "grown_mib": {process: round(each, 1) for process, each in memory.growth().items()},
        "stack": found[0].stack if found else [],
    }


async def measure(repeat: int, names: list[str]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, hold_port() as bulk:
        directory = Path(folder)
        cert, key = copy_certificates(directory)
        port = int(bulk.getsockname()[1])
        probes = Probes(directory / "router.jsonl", directory / "client.jsonl")
        sections = config(directory, port) | {"router": {"tls": {"cert": str(cert), "key": str(key)}}}
        module = ("tests.bench.loop_probe", str(probes.router))
        cluster = RunningCluster(
            directory, 1, 2, sections, late=(STOLEN,), router_module=module, pool_tokens="auto"
        )
        cluster.addresses[BULK] = port
        trusting = ssl.create_default_context(cafile=AUTHORITY)
        url = cluster.url.replace("http:", "https:")
        async with cluster, Client(url, tls=trusting) as client, Streams(client) as streams:
            place = Place(cluster.port, str(cluster.run_dir), cluster.addresses)
            LoopProbe(probes.client)
            await asyncio.sleep(WARM_UP_SECONDS)
            for name in names:
                for _ in range(repeat):
                    rows.append(await measured(cluster, place, streams, probes, name))
                    print(json.dumps(rows[-1]), flush=True)
        assert '"node lost"' not in cluster.log("router")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3, help="how often each attack runs")
    parser.add_argument("--only", nargs="*", default=[], choices=list(ATTACKS))
    given = parser.parse_args()
    rows = asyncio.run(measure(given.repeat, given.only or list(ATTACKS)))
    if given.json:
        load = os.getloadavg()
        result = {"environment": describe() | {"load": [round(each, 1) for each in load]}, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
