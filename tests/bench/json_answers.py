"""Tokens per second of JSON answers against free text, through HTTP, for each drafter, on the CPU.

    python -m tests.bench.json_answers [--drafter none ngram ...] [--at-once 4] [--rounds 6] [--json FILE]

A cluster of the tiny models answers in turns: one block of free text, one of JSON, and so on, so that other load of the
machine meets both alike. Free answers continue word problems, which the drafts were trained on. JSON answers are lists
of records with one layout, without whitespace, of at most as many tokens. Both are greedy. Tokens per step and request
say what the load cannot change, and the processor time of the decode node hardly depends on it; a step of JSON costs
the masks and the loss of overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import take
from tests.bench.environment import describe
from tests.bench.grammars import SCHEMA
from tests.bench.router_cost import cpu_seconds
from tests.cluster.check_grammars import DRAFTERS
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.killed_nodes import cluster_config

SAID = 96  # tokens per answer
JSON = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}


@dataclass(slots=True)
class Side:
    """The totals of one kind of answer."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    busy: float = 0.0  # seconds of processor time of the decode node

    def add(self, tokens: int, seconds: float, steps: int, busy: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += steps
        self.busy += busy

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one drafter."""

    drafter: str
    at_once: int
    free_tokens_per_s: float
    json_tokens_per_s: float
    ratio: float
    busy_ratio: float  # ratio of tokens per second of processor time of the decode node
    free_tokens_per_step: float
    json_tokens_per_step: float
    free_ms: float  # wall-clock time per step, prompts included
    json_ms: float


def prompts_of(directory: Path, count: int, first: int) -> list[list[int]]:
    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = []
    for index in range(first, first + count):
        *shots, last = take(3, 700 + index, "heldout")
        prompts.append(encoder.encode(few_shot_prompt(shots, last.question)).ids)
    return prompts


async def measure(drafter: str, at_once: int, rounds: int) -> Row:
    config = cluster_config(*DRAFTERS[drafter], {})
    directory = Path(config["model"]["path"])
    sides = {"free": Side(), "json": Side()}
    fields: dict[str, dict[str, Any]] = {"free": {}, "json": JSON}
    with tempfile.TemporaryDirectory() as run:
        async with (
            RunningCluster(Path(run), config=config, pool_tokens="auto") as cluster,
            Client(cluster.url) as client,
        ):
            decode = cluster.processes["decode-0"].pid
            for warm in fields.values():
                await client.complete_all(prompts_of(directory, 2, 99), 2, 16, **warm)
            for number in range(rounds):
                for kind, side in sides.items():
                    before, busy = await counted(client), cpu_seconds(decode)
                    prompts = prompts_of(directory, at_once, number * at_once)
                    began = time.monotonic()
                    answers = await client.complete_all(prompts, at_once, SAID, **fields[kind])
                    seconds = time.monotonic() - began
                    after = await counted(client)
                    busy = cpu_seconds(decode) - busy
                    side.add(sum(len(each.tokens) for each in answers), seconds, after - before, busy)
    free, constrained = sides["free"], sides["json"]
    return Row(
        drafter=drafter,
        at_once=at_once,
        free_tokens_per_s=free.speed,
        json_tokens_per_s=constrained.speed,
        ratio=constrained.speed / free.speed,
        busy_ratio=constrained.tokens / constrained.busy / (free.tokens / free.busy),
        free_tokens_per_step=free.tokens / free.steps / at_once,
        json_tokens_per_step=constrained.tokens / constrained.steps / at_once,
        free_ms=1e3 * free.seconds / free.steps,
        json_ms=1e3 * constrained.seconds / constrained.steps,
    )


async def counted(client: Client) -> int:
    """Return the steps of the decode node once it is idle."""
    await client.wait_idle()
    steps: int = (await client.node("decode-0"))["counters"]["steps"]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--at-once", type=int, default=4, help="requests at once")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for drafter in options.drafter:
        rows.append(asyncio.run(measure(drafter, options.at_once, options.rounds)))
        print(json.dumps({k: v if isinstance(v, str) else round(v, 2) for k, v in asdict(rows[-1]).items()}))
    if options.json is not None:
        environment = describe()
        options.json.write_text(
            json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
