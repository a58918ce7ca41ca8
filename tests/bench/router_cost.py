"""The cost of the router: microseconds of its processes' CPU time per request and per token, over real HTTP.

    python -m tests.bench.router_cost http://127.0.0.1:8000 --pid PID --json FILE

PID is the router's; its child processes are included. Loads of equal requests run with one answer token and with
`--output` tokens, streamed and not; the difference is the cost of a token. CPU time is read from /proc, so that other
work on the machine has little effect. To compare two builds, run it against one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.environment import describe

IDLE_SECONDS = 0.02  # CPU time within a second below which a process counts as idle
IDLE_LOOKS = 120


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process and its running children, with nanosecond resolution."""
    total, waiting = 0, [pid]
    while waiting:
        try:
            for thread in Path(f"/proc/{waiting.pop()}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return total / 1e9


async def load(
    session: aiohttp.ClientSession,
    requests: int,
    clients: int,
    output: int,
    stream: bool,
    chat: bool,
    seed: int,
) -> None:
    """Send `count` requests from clients that always wait for an answer. Raises for any status but 200."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(clients)

    async def one() -> None:
        body: dict[str, Any] = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": stream}
        if chat:
            body["messages"] = [{"role": "user", "content": f"How many are {rng.random()}?"}]
        else:
            body["prompt"] = [rng.randrange(3, 700) for _ in range(64)]
        async with (
            gate,
            session.post("/v1/chat/completions" if chat else "/v1/completions", json=body) as response,
        ):
            response.raise_for_status()
            await response.read()

    await asyncio.gather(*(one() for _ in range(requests)))


async def idle(pid: int) -> None:
    """Return once the router and its children are almost idle."""
    before = cpu_seconds(pid)
    for _ in range(IDLE_LOOKS):
        await asyncio.sleep(1)
        now = cpu_seconds(pid)
        if now - before < IDLE_SECONDS:
            return
        before = now
    raise TimeoutError(f"process {pid} is busy with something else; measure it without other clients")


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(arguments.url, connector=connector) as session:
        await load(session, 50, arguments.clients, 4, True, True, 0)  # warm-up
        await idle(arguments.pid)  # workers may still be starting
        for kind, stream, chat in (
            ("completions", False, False),
            ("stream", True, False),
            ("chat stream", True, True),
        ):
            spent = {}
            for output in (1, arguments.output):
                before = cpu_seconds(arguments.pid)
                for seed in (1, 2, 3):
                    await load(session, arguments.requests, arguments.clients, output, stream, chat, seed)
                spent[output] = (cpu_seconds(arguments.pid) - before) / (3 * arguments.requests)
            token = (spent[arguments.output] - spent[1]) / (arguments.output - 1)
            results[kind] = {
                "us_per_request": round(spent[1] * 1e6, 1),
                "us_per_token": round(token * 1e6, 2),
            }
            print(
                f"{kind}: {spent[1] * 1e6:.0f} us per request of one token, {token * 1e6:.1f} us per further token"
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True, help="of the router")
    parser.add_argument("--requests", type=int, default=300, help="per load; three loads each")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--output", type=int, default=65, help="tokens of the longer answers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": describe(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
