"""The effect of hostile clients on the router: stalls of its event loop, memory, and the cost of a normal chat.

    python -m tests.bench.router_hostile [--json FILE] [--repeat 3]

A real router process serves scripted nodes (tests/bench/scripted_pair.py). Every body of hostile_bodies.py is sent
`--repeat` times at once, then every attack of hostile_clients.py runs once. `stall_ms` is the longest stall of the
router's event loop measured by its probe (loop_probe.py), without the time in which other processes had the processor;
`late_ms` is the longest delay including that time. `grown_mib` is the peak of the router's resident memory over its
previous value. The chat lines give CPU time per request, of the router and of its other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.environment import describe
from tests.bench.hostile_bodies import CHAT, CORPUS
from tests.bench.hostile_clients import ATTACKS
from tests.bench.loop_probe import stalls
from tests.bench.raw_http import serving
from tests.bench.scripted_pair import ScriptedPair
from tests.cluster.harness import RunningCluster
from tests.fakes.proc_files import with_children

CHATS = 200
TICKS_PER_SECOND = 100
POOLS = (1 << 24, 1 << 24)
MAX_MODEL_LEN = 4096
STEP_SECONDS = 0.1
TOKENS_PER_STEP = 32
SETTLE_SECONDS = 0.5
STALLS_SHOWN = 3
HEADERS = {"Content-Type": "application/json"}


def _memory(pid: int, field: str) -> float:
    """Return the MiB of VmRSS, or of VmHWM, the maximum since `_reset_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def _others(pid: int) -> float:
    """Return the CPU time of all descendants of a process."""
    return sum(_cpu(int(each.name)) for each in with_children(Path(f"/proc/{pid}"))) - _cpu(pid)


@dataclass(frozen=True)
class Target:
    """A router with scripted nodes, and the file of its probe."""

    port: int
    pid: int
    probe: Path
    pair: ScriptedPair


async def measured(target: Target, name: str, attack: Callable[[], Awaitable[list[int]]]) -> dict[str, Any]:
    await asyncio.sleep(SETTLE_SECONDS)
    before = _memory(target.pid, "VmRSS")
    _reset_peak(target.pid)
    since = time.monotonic()
    statuses = await attack()
    seconds = time.monotonic() - since
    await asyncio.sleep(SETTLE_SECONDS)
    found = stalls(target.probe, since, time.monotonic())
    longest = found[0] if found else None
    return {
        "attack": name,
        "statuses": sorted(set(statuses)),
        "seconds": round(seconds, 2),
        "stall_ms": round(1000 * longest.seconds, 1) if longest else 0.0,
        "stall_cpu_ms": round(1000 * longest.cpu, 1) if longest else 0.0,
        "late_ms": round(1000 * max((each.late for each in found), default=0.0), 1),
        "over_20_ms": sum(each.seconds > 0.02 for each in found),
        "grown_mib": round(_memory(target.pid, "VmHWM") - before, 1),
        "kept_mib": round(_memory(target.pid, "VmRSS") - before, 1),
        "stacks": [each.stack for each in found[:STALLS_SHOWN] if each.stack],
    }


async def send_bodies(port: int, name: str, repeat: int) -> list[int]:
    path, make = CORPUS[name]
    body = make()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", read_bufsize=1 << 20) as session:

        async def send() -> int:
            try:
                async with session.post(path, data=body, headers=HEADERS) as response:
                    async for _ in response.content.iter_any():
                        pass
                    return response.status
            except aiohttp.ClientError:
                return 0

        return list(await asyncio.gather(*(send() for _ in range(repeat))))


async def chats(port: int, pid: int, messages: int) -> dict[str, Any]:
    """Measure the CPU time of normal chats of `messages` messages and one answer token, one after the other."""
    turns = [{"role": "user", "content": "How many apples are there in 3 boxes of 12?"}]
    turns += [{"role": "assistant", "content": "36"}, *turns] * (messages // 2)
    body = json.dumps({"messages": turns, "max_tokens": 1, "temperature": 0}).encode()
    waits = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for number in range(CHATS + 20):
            if number == 20:
                begun, workers = _cpu(pid), _others(pid)
            started = time.perf_counter()
            async with session.post(CHAT, data=body, headers=HEADERS) as response:
                assert response.status == 200, await response.text()
                await response.read()
            waits.append(time.perf_counter() - started)
    waits = sorted(waits[20:])
    return {
        "chat of messages": len(turns),
        "router_cpu_us": round(1e6 * (_cpu(pid) - begun) / CHATS),
        "workers_cpu_us": round(1e6 * (_others(pid) - workers) / CHATS),
        "p50_ms": round(1000 * waits[len(waits) // 2], 2),
    }


async def measure(repeat: int, only: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "stalls.jsonl"
        cluster = RunningCluster(
            Path(directory),
            config={
                "prefill": {"pool_tokens": POOLS[0]},
                "decode": {"pool_tokens": POOLS[1], "max_running": 2048},
            },
            router_module=("tests.bench.loop_probe", str(probe)),
        )
        cluster.launch("router")
        try:
            await serving(cluster)
            async with ScriptedPair(cluster, POOLS, MAX_MODEL_LEN, STEP_SECONDS, TOKENS_PER_STEP) as pair:
                target = Target(cluster.port, cluster.processes["router"].pid, probe, pair)
                attacks: dict[str, Callable[[], Awaitable[list[int]]]] = {"nothing": _nothing}
                attacks |= {name: partial(send_bodies, cluster.port, name, repeat) for name in CORPUS}
                attacks |= {name: partial(attack, cluster.port, pair) for name, attack in ATTACKS.items()}
                for name in only or attacks:
                    rows.append(await measured(target, name, attacks[name]))
                    print(json.dumps(rows[-1]), flush=True)
                for messages in () if only else (1, 5):
                    rows.append(await chats(cluster.port, target.pid, messages))
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            cluster.stop()
    return rows


async def _nothing() -> list[int]:
    await asyncio.sleep(5)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3, help="copies of each body, sent at once")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted([*CORPUS, *ATTACKS, "nothing"]))
    given = parser.parse_args()
    rows = asyncio.run(measure(given.repeat, given.only))
    if given.json:
        given.json.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
