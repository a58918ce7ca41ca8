"""First tokens and gaps of short prompts through a running cluster, alone and beside long prompts.

    python -m tests.bench.local_prefill http://127.0.0.1:8000 [--short 128] [--rate 8] [--long 8192] [--long-rate 4]
        [--output 64] [--seconds 30] [--seeds 2] [--vocab 100000] [--json FILE]

Run it once against a cluster with `router.local_prefill: 0` and once with the limit that is to be measured; equal seeds
give equal arrivals and prompts. Arrivals are Poisson, and all prompts are new. `short` are the prompts in question. In
the second part long ones arrive at the same time, which keep prefill nodes busy; `long` shows what the steps of decode
nodes pay for prompts that are computed between them. The last column is how many prompts decode nodes have computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from deploy.load_generator.loads import open_load
from deploy.load_generator.measurement import Bodies, MeasuredLoad, Measurement, Target
from deploy.load_generator.plan import PromptShape
from deploy.load_generator.summary import Limits
from deploy.openai_client import api_base, first_model
from tests.bench.environment import describe
from tests.bench.serve import open_session

HEADER = f"{'':24} {'ttft p50':>9} {'p99':>8} {'gap p50':>8} {'p99':>8} {'max':>8} {'second':>8} {'local':>6}"


async def measured(
    target: Target, rate: float, shape: PromptShape, salt: int, options: argparse.Namespace
) -> MeasuredLoad:
    """Return one load with all seeds. Raises RuntimeError if a request fails."""
    bodies, seeds = Bodies(options.vocab, salt), range(options.seeds)
    load = open_load(rate, options.seconds, shape)
    measurement = Measurement([target], [load], seeds, bodies, Limits())
    (found,) = [each async for each in measurement.run()]
    if found.errors:
        raise RuntimeError(found.errors[0])
    return found


async def local_prompts(session: aiohttp.ClientSession) -> float:
    """Return how many prompts nodes have computed that are up as decode nodes."""
    async with session.get("/metrics") as response:
        families = {each.name: each for each in text_string_to_metric_families(await response.text())}
    up = {
        (sample.labels["engine"], sample.labels["role"]): sample.value
        for sample in families["tandem_node_up"].samples
    }
    return sum(
        sample.value
        for sample in families["tandem_node_requests"].samples
        if sample.name.endswith("_total")
        and sample.labels["role"] == "prefill"
        and up.get((sample.labels["engine"], "decode"))
    )


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    base = api_base(options.url)
    short, long = PromptShape(options.short, options.output), PromptShape(options.long, options.output)
    rows = []
    async with open_session(options.url) as session:
        target = Target(options.url, base, await first_model(session, base), session)
        warm = Measurement([target], [], [], Bodies(options.vocab, 3), Limits())
        await warm.warm_up(2, short)
        await warm.warm_up(2, long)
        for part in ("alone", "beside long prompts"):
            before = await local_prompts(session)
            jobs = [measured(target, options.rate, short, 1, options)]
            if part != "alone":
                jobs.append(measured(target, options.long_rate, long, 2, options))
            found: Sequence[MeasuredLoad] = await asyncio.gather(*jobs)
            local = await local_prompts(session) - before
            for kind, each in zip(("short", "long"), found, strict=False):
                rows.append({"part": part, "prompts": kind, "local": local, **asdict(each.summary)})
                show(rows[-1])
                for doubt in each.doubts:
                    print(f"not to be trusted: {doubt}")
    return rows


def show(row: dict[str, Any]) -> None:
    columns = f"{row['ttft_ms_p50']:9.2f} {row['ttft_ms_p99']:8.1f} {row['gap_ms_p50']:8.2f} {row['gap_ms_p99']:8.2f}"
    rest = f"{row['gap_ms_max']:8.1f} {row['second_ms_p50']:8.2f} {row['local']:6.0f}"
    print(f"{row['prompts']:>5} {row['part']:18} {columns} {rest}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--short", type=int, default=128, help="tokens of a short prompt")
    parser.add_argument("--rate", type=float, default=8.0, help="short prompts per second")
    parser.add_argument("--long", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--long-rate", type=float, default=4.0, help="long prompts per second")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(HEADER)
    rows = asyncio.run(measure(options))
    if options.json is not None:
        report = {"environment": describe(), "options": vars(options) | {"json": None}, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2, default=str))


if __name__ == "__main__":
    main()
