"""Time to first token, inter-token latency and throughput of a running cluster, through HTTP.

    python -m tests.bench.serve http://127.0.0.1:8000 --input 512 --output 64 --concurrency 1 8 32 --json FILE
    python -m tests.bench.serve http://127.0.0.1:8000 --input 1024 --output 256 --rates 8 16 32 --seconds 20

--concurrency is a closed loop: each of C clients sends its next request when the last one is answered. --rates is an
open loop: Poisson arrivals, whatever the cluster does; `goodput` is the share of requests within LIMITS. `second` is
the gap between the first two events of a request, which includes the transfer of its prompt's KV. It is deploy/bench
with one seed, plus what it reads of the cluster's graphs.

Prompts are random token ids, all different, so that no prefix cache helps. With --floor MODEL the same prompts run
through `transformers` generate, one at a time, in this process: the ratio at concurrency 1 is the overhead or gain of
the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from deploy.load_generator.loads import Load, closed_load, open_load
from deploy.load_generator.measurement import Bodies, Measurement, Target
from deploy.load_generator.plan import PromptShape, PromptTokens, closed_plan
from deploy.load_generator.summary import Limits
from deploy.openai_client import api_base, first_model
from tests.bench.environment import describe

GRAPH_LABELS = "engine", "model", "phase", "reason"
LIMITS = Limits()


def loads(options: argparse.Namespace) -> list[Load]:
    shape = PromptShape(options.input, options.output)
    if options.rates:
        return [open_load(rate, options.seconds, shape) for rate in options.rates]
    return [closed_load(clients, options.requests or None, shape) for clients in options.concurrency]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and print all levels. Raises RuntimeError if a request fails."""
    base = api_base(options.url)
    rows = []
    async with open_session(options.url) as session:
        target = Target(options.url, base, await first_model(session, base), session)
        bodies = Bodies(options.vocab, options.seed)
        measurement = Measurement([target], loads(options), [options.seed], bodies, LIMITS)
        await measurement.warm_up(2, PromptShape(options.input, options.output))
        async for measured in measurement.run():
            if measured.errors:
                raise RuntimeError(measured.errors[0])
            rows.append({"load": measured.load, **asdict(measured.summary)})
            show(rows[-1])
            for doubt in measured.doubts:
                print(f"not to be trusted: {doubt}")
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['load']:>10} {row['ttft_ms_p50']:8.1f} {row['ttft_ms_p99']:8.1f} {row['gap_ms_p50']:8.2f} "
        f"{row['gap_ms_p99']:8.2f} {row['gap_ms_max']:8.1f} {row['second_ms_p50']:8.2f} "
        f"{row['second_ms_p99']:8.2f} {row['token_ms_p50']:8.2f} "
        f"{row['output_tokens_per_s']:8.0f} {row['goodput']:4.0%}"
    )


def open_session(url: str) -> aiohttp.ClientSession:
    """Open one pool of connections; relative URLs are the server's."""
    timeout = aiohttp.ClientTimeout(total=600)
    headers = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(
        url, timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0)
    )


async def graph_use(url: str) -> dict[str, float]:
    """Return forwards of every captured phase since the cluster's start: replays, and eager runs by reason."""
    async with open_session(url) as session, session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            " ".join(
                (
                    family.name.removeprefix("tandem_"),
                    *(sample.labels.get(label, "") for label in GRAPH_LABELS),
                )
            ).strip(): sample.value
            for family in families
            if family.name in ("tandem_graph_replays", "tandem_graph_fallbacks")
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


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return the first prompts of a run with the seed of the command line."""
    plan = closed_plan(6, PromptShape(options.input, options.output), options.seed)
    tokens = PromptTokens(options.vocab, options.seed, (0, options.seed))
    return [tokens.of(request) for request in plan]


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
    columns = ("ttft p50", "p99", "gap p50", "p99", "max", "second", "p99", "tok p50", "tok/s")
    print(f"{'load':>10} " + " ".join(f"{name:>8}" for name in columns) + " good")
    rows = asyncio.run(measure(options))
    graphs = asyncio.run(graph_use(options.url))
    floor = transformers_alone(options.floor, prompts(options), options.output) if options.floor else None
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
