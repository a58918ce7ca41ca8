"""What hostile bodies do to the router: stalls of its event loop, memory, and what a normal chat costs it.

    python -m tests.bench.router_hostile [--json FILE] [--repeat 3]

Starts a cluster of the checked-in model. For every body of CORPUS, `--repeat` copies are sent at once; meanwhile a
process of its own asks GET /live every 2 ms over one connection: its longest waits are the stalls of the event loop
(and of the machine: the first line shows them without any load). `grown` is by how much the router's resident memory
peaked over what it was before. The chat lines give CPU time per request, of the router and of its other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.environment import describe
from tests.cluster.harness import RunningCluster

MIB = 1 << 20
BODY = 10 * MIB - 64
PROBE_SECONDS = 0.002
CHATS = 200
TICKS_PER_SECOND = 100


def _list_of(item: bytes) -> bytes:
    return b'{"prompt":[' + item * (BODY // len(item)) + item.rstrip(b",") + b"]}"


def _chat(content: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]}"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CORPUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nothing": ("", lambda: b""),
    "empty lists": (COMPLETIONS, lambda: _list_of(b"[],")),
    "empty objects": (COMPLETIONS, lambda: _list_of(b"{},")),
    "token ids": (COMPLETIONS, lambda: _list_of(b"5,")),
    "large token ids": (COMPLETIONS, lambda: _list_of(b"699,")),
    "keys": (
        COMPLETIONS,
        lambda: b'{"prompt":"x","user":{' + b",".join(b'"%d":1' % n for n in range(BODY // 11)) + b"}}",
    ),
    "biases": (
        COMPLETIONS,
        lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(BODY // 11)) + b"}}",
    ),
    "escapes": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\n" * (BODY // 2 - 16) + b'"}'),
    "brackets in a string": (COMPLETIONS, lambda: b'{"prompt":"' + b"[" * (8 * MIB - 1) + b'"}'),
    "strings of brackets": (COMPLETIONS, lambda: _list_of(b'"[",')),
    "words": (COMPLETIONS, lambda: b'{"prompt":"' + b"hello " * (8 * MIB // 6) + b'"}'),
    "digits": (COMPLETIONS, lambda: b'{"prompt":"' + b"1" * (8 * MIB - 1) + b'"}'),
    "prompt of 256 KiB": (COMPLETIONS, lambda: b'{"prompt":"' + b"hello " * 43_000 + b'"}'),
    "parts": (CHAT, lambda: _chat(b"[" + b",".join([b'{"type":"text","text":"x"}'] * (BODY // 28)) + b"]")),
    "chat of 8 MiB": (CHAT, lambda: _chat(b'"' + b"hello " * (8 * MIB // 6) + b'"')),
    "chat of 4,096 messages": (
        CHAT,
        lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"hello hello"}'] * 4096) + b"]}",
    ),
    "tokenize 8 MiB": ("/tokenize", lambda: b'{"prompt":"' + b"hello " * (8 * MIB // 6) + b'"}'),
    "detokenize 1 Mi": ("/detokenize", lambda: b'{"tokens":[' + b"5," * (MIB - 1) + b"5]}"),
}
HEADERS = {"Content-Type": "application/json"}


def probe(port: int) -> None:
    """The process of its own: waits for GET /live until standard input closes, then prints them."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    waits: list[float] = []

    while not select.select([sys.stdin], [], [], PROBE_SECONDS)[0]:
        started = time.perf_counter()
        connection.request("GET", "/live")
        connection.getresponse().read()
        waits.append(time.perf_counter() - started)
    print(json.dumps(sorted(waits)))


def _memory(pid: int, field: str) -> float:
    """MiB of VmRSS, or of VmHWM: the most since `_reset_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _cpu(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def hostile(port: int, pid: int, name: str, repeat: int) -> dict[str, Any]:
    path, make = CORPUS[name]
    body = make()
    watcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.router_hostile", "--probe", str(port)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 26,
    )
    await asyncio.sleep(0.5)
    before = _memory(pid, "VmRSS")
    _reset_peak(pid)
    started = time.perf_counter()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def send() -> int:
            try:
                async with session.post(path, data=body, headers=HEADERS) as response:
                    await response.read()
                    return response.status
            except aiohttp.ClientError:
                return 0

        statuses = await asyncio.gather(*(send() for _ in range(repeat))) if path else []
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.5)
    printed, _ = await watcher.communicate(b"")
    waits: list[float] = json.loads(printed)
    return {
        "body": name,
        "statuses": sorted(set(statuses)),
        "seconds": round(seconds, 2),
        "p99_ms": round(1000 * waits[int(0.99 * len(waits))], 1),
        "max_ms": round(1000 * waits[-1], 1),
        "grown_mib": round(_memory(pid, "VmHWM") - before, 1),
        "kept_mib": round(_memory(pid, "VmRSS") - before, 1),
    }


async def chats(port: int, pid: int, messages: int) -> dict[str, Any]:
    """CPU time of normal chats of `messages` messages, one token each, one after the other."""
    turns = [{"role": "user", "content": "How many apples are there in 3 boxes of 12?"}]
    turns += [{"role": "assistant", "content": "36"}, *turns] * (messages // 2)
    body = json.dumps({"messages": turns, "max_tokens": 1, "temperature": 0}).encode()
    waits = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for number in range(CHATS + 20):
            if number == 20:
                begun, workers = _cpu(pid), sum(map(_cpu, _children(pid)))
            started = time.perf_counter()
            async with session.post(CHAT, data=body, headers=HEADERS) as response:
                assert response.status == 200, await response.text()
                await response.read()
            waits.append(time.perf_counter() - started)
    waits = sorted(waits[20:])
    return {
        "chat of messages": len(turns),
        "router_cpu_us": round(1e6 * (_cpu(pid) - begun) / CHATS),
        "workers_cpu_us": round(1e6 * (sum(map(_cpu, _children(pid))) - workers) / CHATS),
        "p50_ms": round(1000 * waits[len(waits) // 2], 2),
    }


async def measure(repeat: int, only: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        async with RunningCluster(Path(directory)) as cluster:
            pid = cluster.processes["router"].pid
            for messages in (1, 5):
                rows.append(await chats(cluster.port, pid, messages))
                print(rows[-1], flush=True)
            for name in only or CORPUS:
                rows.append(await hostile(cluster.port, pid, name, repeat))
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(CORPUS))
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        probe(given.probe)
        return
    rows = asyncio.run(measure(given.repeat, given.only))
    if given.json:
        given.json.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
