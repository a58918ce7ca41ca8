"""Time to first token, inter-token latency and throughput of a running cluster, through HTTP.

    python -m tests.bench.serve http://127.0.0.1:8000 --input 512 --output 64 --concurrency 1 8 32 --json FILE
    python -m tests.bench.serve http://127.0.0.1:8000 --input 1024 --output 256 --rates 8 16 32 --seconds 20

--concurrency is a closed loop: each of C clients sends its next request when the last one is answered. --rates is an
open loop: Poisson arrivals, whatever the cluster does; `goodput` is the share of requests within LIMITS. `second` is
the gap between the first two events of a request, which includes the transfer of its prompt's KV.

Prompts are random token ids, all different, so that no prefix cache helps. With --floor MODEL the same prompts run
through `transformers` generate, one at a time, in this process: the ratio at concurrency 1 is the overhead or gain of
the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.environment import describe

GRAPH_LABELS = "engine", "model", "phase", "reason"
LIMITS = 0.200, 0.015  # seconds: time to first token, and every gap after it, for `goodput`


@dataclass
class Sample:
    """One request: seconds to the first token, and between the events after it."""

    first: float
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def per_token(self) -> float:
        """Return the seconds per token after the first; one event may carry several."""
        return sum(self.gaps) / max(self.tokens - 1, 1)

    def within(self, first: float, gap: float) -> bool:
        """Return whether the first token and every gap of the request are within the limits, in seconds."""
        return self.first <= first and max(self.gaps, default=0.0) <= gap


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def one_request(session: aiohttp.ClientSession, prompt: list[int], output: int) -> Sample:
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = last = time.perf_counter()
    sample: Sample | None = None
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            now = time.perf_counter()
            if event["choices"]:
                if sample is None:
                    sample = Sample(now - started)
                else:
                    sample.gaps.append(now - last)
                last = now
            elif sample is not None:
                sample.tokens = event["usage"]["completion_tokens"]
    if sample is None:
        raise RuntimeError("an answer without a token")
    return sample


def open_session(url: str) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def closed_loop(url: str, prompts: list[list[int]], output: int, concurrency: int) -> dict[str, Any]:
    """Send all prompts, `concurrency` at a time."""
    waiting = iter(prompts)
    samples: list[Sample] = []
    async with open_session(url) as session:

        async def client() -> None:
            for prompt in waiting:
                samples.append(await one_request(session, prompt, output))

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    return {"load": concurrency, **summary(samples, seconds)}


async def open_loop(
    url: str, prompts: list[list[int]], output: int, rate: float, rng: random.Random
) -> dict[str, Any]:
    """Send each prompt at its own time, `rate` per second on average, however many are unanswered."""
    async with open_session(url) as session:
        tasks = []
        due = started = time.perf_counter()
        for prompt in prompts:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(one_request(session, prompt, output)))
        samples = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - started
    return {"load": rate, **summary(samples, seconds)}


def summary(samples: list[Sample], seconds: float) -> dict[str, Any]:
    gaps = [gap for sample in samples for gap in sample.gaps]
    firsts = [sample.first for sample in samples]
    seconds_to_second = [sample.gaps[0] for sample in samples if sample.gaps] or [0.0]
    per_token = [sample.per_token for sample in samples]
    return {
        "requests": len(samples),
        "ttft_ms_p50": 1e3 * statistics.median(firsts),
        "ttft_ms_p99": 1e3 * percentile(firsts, 0.99),
        "gap_ms_p50": 1e3 * statistics.median(gaps),
        "gap_ms_p99": 1e3 * percentile(gaps, 0.99),
        "gap_ms_max": 1e3 * max(gaps),
        "second_ms_p50": 1e3 * statistics.median(seconds_to_second),
        "second_ms_p99": 1e3 * percentile(seconds_to_second, 0.99),
        "token_ms_p50": 1e3 * statistics.median(per_token),
        "token_ms_p99": 1e3 * percentile(per_token, 0.99),
        "output_tokens_per_s": sum(sample.tokens for sample in samples) / seconds,
        "requests_per_s": len(samples) / seconds,
        "goodput": statistics.mean(sample.within(*LIMITS) for sample in samples),
    }


async def graph_use(url: str) -> dict[str, float]:
    """Return forwards of every captured phase since the cluster's start: replays, and eager runs by reason."""
    async with open_session(url) as session, session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            " ".join(
                (family.name, *(sample.labels.get(label, "") for label in GRAPH_LABELS))
            ).strip(): sample.value
            for family in families
            if family.name in ("graph_replays", "graph_fallbacks")
            for sample in family.samples
        }


def transformers_alone(path: Path, prompts: list[list[int]], output: int) -> dict[str, Any]:
    """Measure the same work by `generate`: one prompt at a time, fp32 on the CPU with one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    first: list[float] = []
    total = 0.0
    for prompt in prompts:
        for length, into in ((1, first), (output, None)):
            started = time.perf_counter()
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **options)
            seconds = time.perf_counter() - started
            if into is not None:
                into.append(seconds)
            else:
                total += seconds
    return {
        "ttft_ms_p50": 1e3 * statistics.median(first),
        "output_tokens_per_s": output * len(prompts) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--input", type=int, default=512, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="answer tokens")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--requests", type=int, default=0, help="per level; default: 4 per client, at least 12"
    )
    parser.add_argument("--rates", type=float, nargs="+", help="open loop: requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="open loop: length of the arrivals")
    parser.add_argument("--vocab", type=int, default=700, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--floor", type=Path, help="model directory for the transformers comparison")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(3, options.vocab) for _ in range(options.input)] for _ in range(count)]

    asyncio.run(closed_loop(options.url, prompts(2), options.output, 1))  # warm-up
    rows = []
    columns = ("ttft p50", "p99", "gap p50", "p99", "max", "second", "p99", "tok p50", "tok/s")
    print(f"{'load':>6} " + " ".join(f"{name:>8}" for name in columns) + " good")
    for level in options.rates or options.concurrency:
        if options.rates:
            count = max(12, int(level * options.seconds))
            row = asyncio.run(open_loop(options.url, prompts(count), options.output, level, rng))
        else:
            count = options.requests or max(12, 4 * level)
            row = asyncio.run(closed_loop(options.url, prompts(count), options.output, level))
        rows.append(row)
        print(
            f"{level:6g} {row['ttft_ms_p50']:8.1f} {row['ttft_ms_p99']:8.1f} {row['gap_ms_p50']:8.2f} "
            f"{row['gap_ms_p99']:8.2f} {row['gap_ms_max']:8.1f} {row['second_ms_p50']:8.2f} "
            f"{row['second_ms_p99']:8.2f} {row['token_ms_p50']:8.2f} "
            f"{row['output_tokens_per_s']:8.0f} {row['goodput']:4.0%}"
        )
    graphs = asyncio.run(graph_use(options.url))
    floor = transformers_alone(options.floor, prompts(6), options.output) if options.floor else None
    if floor is not None:
        print(
            f"transformers generate: ttft {floor['ttft_ms_p50']:.1f} ms, {floor['output_tokens_per_s']:.0f} tok/s"
        )
    if options.json:
        report = {
            "environment": describe(),
            "options": vars(options),
            "levels": rows,
            "graphs": graphs,
            "transformers": floor,
        }
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
