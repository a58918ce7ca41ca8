"""Sends conversations in turn, several rounds of them, and notes what decode nodes found in host memory in each round.

    python -m tests.gpu.conversations URL --json FILE [--count 10] [--tokens 16384] [--answer 32] [--rounds 2]
        [--vocab 99000]

One request at a time. `tokens` are those of a prompt and its answer. Every round has the same prompts; the counters of
all engines are read before the first round and after each one, once they have stopped changing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from deploy.load_generator.plan import PromptShape, PromptTokens, closed_plan
from deploy.load_generator.stream import RequestTimes, stream_completion
from deploy.openai_client import api_base, first_model
from tests.bench.serve import open_session

# Counter of /metrics -> how `expect` knows it.
COUNTERS: Final = {
    "tandem_host_tier_hits_total": "hits",
    "tandem_host_tier_stores_total": "stores",
    "tandem_host_tier_checksum_failures_total": "checksum_failures",
    "vllm:external_prefix_cache_hits_total": "received",
    "tandem_missing_marks_total": "missing_marks",
    "tandem_late_launches_total": "late_launches",
}
QUIET_SECONDS = 2.0  # without a change: longer than between two heartbeats
SETTLE_SECONDS = 30.0

Counters = dict[str, dict[str, float]]  # engine -> counter -> value


def counters(metrics: str) -> Counters:
    """Return the counters of each engine in an answer of /metrics."""
    found: Counters = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = COUNTERS.get(sample.name)
            if name is not None:
                own = found.setdefault(sample.labels["engine"], {})
                own[name] = own.get(name, 0) + sample.value
    return found


async def settled(session: aiohttp.ClientSession) -> Counters:
    """Return the counters once they have not changed for QUIET_SECONDS. Raises TimeoutError."""
    async with asyncio.timeout(SETTLE_SECONDS):
        found: Counters = {}
        since = time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            async with session.get("/metrics") as response:
                latest = counters(await response.text())
            if latest != found:
                found, since = latest, time.monotonic()
            await asyncio.sleep(QUIET_SECONDS / 8)
        return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the counters before the first round, and of each round its times and the counters after it.

    Raises RuntimeError if a request fails.
    """
    shape = PromptShape(options.tokens - options.answer, options.answer)
    plan, prompts = closed_plan(options.count, shape, 0), PromptTokens(options.vocab, 5, (0, 0))
    async with open_session(options.url) as session:
        url = api_base(options.url)
        common = {"model": await first_model(session, url), "max_tokens": options.answer, "stream": True}
        common |= {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        bodies = [msgspec.json.encode({"prompt": prompts.of(each), **common}) for each in plan]
        latest = before = await settled(session)
        rounds = []
        for number in range(options.rounds):
            times = [await stream_completion(session, f"{url}/completions", body) for body in bodies]
            if errors := [each.error for each in times if each.error]:
                raise RuntimeError(f"{len(errors)} of {len(times)} requests failed: {errors[0]}")
            earlier, latest = latest, await settled(session)
            rounds.append({**told(times), "after": latest})
            print(f"round {number}: {line(rounds[-1])}")
            for engine, gained in gains(earlier, latest).items():
                print(f"  {engine}: {', '.join(f'{name} {value:.0f}' for name, value in gained.items())}")
    return {"prompt_tokens": options.count * shape.input, "before": before, "rounds": rounds}


def gains(before: Counters, after: Counters) -> Counters:
    """Return by how much the counters of each engine have grown."""
    return {
        engine: {name: value - before.get(engine, {}).get(name, 0) for name, value in own.items()}
        for engine, own in after.items()
    }


def told(times: list[RequestTimes]) -> dict[str, list[float]]:
    """Return milliseconds, by conversation: `second` is the first gap, in which the decode node gets its pages."""
    return {
        "first_ms": [round(1e3 * each.first, 2) for each in times],
        "second_ms": [round(1e3 * each.gaps[0], 2) for each in times if each.gaps],
    }


def line(measured: Mapping[str, Any]) -> str:
    """Return the times of a round as text."""
    return ", ".join(
        f"{name} token p50 / max {statistics.median(values):.1f} / {max(values):.1f} ms"
        for name, values in (("first", measured["first_ms"]), ("second", measured["second_ms"]))
        if values
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="send conversations in turn")
    parser.add_argument("url")
    parser.add_argument("--json", type=Path, required=True)
    for name, default in (("count", 10), ("tokens", 16384), ("answer", 32), ("rounds", 2), ("vocab", 99000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.json.write_text(json.dumps(asyncio.run(measure(options)), indent=1))


if __name__ == "__main__":
    main()
