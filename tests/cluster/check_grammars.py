"""Checks constrained answers of clusters: valid by a validator, and token for token those of a masked reference.

    python -m tests.cluster.check_grammars [--schemas 100] [--first 0] [--drafter none ...] [--setting 1p1d ...]

Every random schema (tests/fakes/random_grammars.py) is asked for twice, greedily and with a seed at temperature 1; one
regex, choice, Lark or EBNF grammar comes with every eight schemas. In every second block of requests as many without a
constraint are between them. The settings: 1p1d; 2p2d; retraction, where decode pools are too small for all requests
at once; kill, where nodes of both roles are killed in turn and started again until all answers are there. It prints a
line of JSON per cluster, with the first problem and how to run only that; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.check_families import shipped
from tests.cluster.constrained_answers import Answered, Asked, Config, Questions, ask_all, judged
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.masked_reference import shipped_reference
from tests.fakes.waiting import PATIENCE

TEXT_EVERY = 8
SMALL_POOL = 512  # tokens: some of the requests at once
TREE = {"topk": 4, "draft_tokens": 16}
# Name -> name of deploy/clusters/local-NAME.yaml, and what differs from it.
DRAFTERS: dict[str, tuple[str, Config]] = {
    "none": ("plain", {}),
    "ngram": ("ngram", {}),
    "eagle": ("eagle", {}),
    "eagle-tree": ("eagle", TREE),
    "eagle3": ("eagle3", {}),
    "eagle3-tree": ("eagle3", TREE),
    "eagle3-adaptive": ("eagle3", {"adaptive": "auto"}),
    "mtp": ("mtp", {}),
    "standalone": ("standalone", {}),
    "hybrid": ("hybrid", {}),
}
SETTINGS: dict[str, Config] = {
    "1p1d": {},
    "2p2d": {"router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}}},
    "retraction": {"kv": {"page_size": 4}, "decode": {"pool_tokens": SMALL_POOL, "reserved_tokens": 0}},
    # A request may meet more kills here than in a cluster.
    "kill": {"router": {"max_crashes": 0, "max_attempts": 10}},
}


async def kill_in_turn(cluster: RunningCluster, client: Client, kills: Counter[str]) -> None:
    """Kill one node after the other while it works, and start it again, until cancelled."""
    for victim in itertools.cycle(("decode-0", "prefill-0", "decode-1", "prefill-1")):
        deadline = time.monotonic() + PATIENCE
        while victim.startswith("decode") and not (await client.node(victim))["load"]["running"]:
            assert time.monotonic() < deadline, f"{victim} got no request"
            await asyncio.sleep(0.01)
        cluster.kill(victim)
        await client.gone(victim)
        kills[victim] += 1
        cluster.launch(victim)
        await cluster.wait_nodes()


async def serve(
    config: Config, nodes: int, kill: bool, asked: Sequence[Asked], limit: float
) -> tuple[list[tuple[Asked, Answered]], Config]:
    """Start a cluster, ask everything, and return the answers and what the nodes counted."""
    kills: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        async with RunningCluster(Path(directory), nodes, nodes, config=config) as cluster:
            async with Client(cluster.url) as client:
                began = time.monotonic()
                killing = asyncio.create_task(kill_in_turn(cluster, client, kills)) if kill else None
                answers = await ask_all(client, asked, limit)
                ended = time.monotonic()
                if killing is not None:
                    if killing.done():
                        killing.result()
                    killing.cancel()
                    await asyncio.gather(killing, return_exceptions=True)
                    await cluster.wait_nodes()
                await client.wait_idle()
                info = await client.info()
    counters: Counter[str] = Counter()
    for node in info["nodes"]:
        if node["role"] == "decode":
            counters.update({name: node["counters"][name] for name in SHOWN})
    lengths = [state["avg_spec_accept_length"] for state in info["internal_states"]]
    return answers, {
        "seconds": round(ended - began, 1),  # for the reader: it decides nothing
        **counters,
        "kills": kills.total(),
        "accept_lengths": [round(length, 2) for length in lengths],
    }


SHOWN = ("steps", "retractions", "spec_forced_tokens", "spec_accepted_forced")


def config_of(drafter: str, setting: str) -> Config:
    """Return the sections of the cluster file of a run."""
    name, more = DRAFTERS[drafter]
    sections = shipped(name)
    if more:
        sections["speculation"] |= more
    for section, keys in SETTINGS[setting].items():
        sections.setdefault(section, {}).update(keys)
    return sections


def run(drafter: str, setting: str, names: Sequence[str], limit: float) -> Config:
    """Return the results of one cluster."""
    file = DRAFTERS[drafter][0]
    asked = Questions(Path(shipped(file)["model"]["path"])).all(names)
    nodes = 2 if setting in ("2p2d", "kill") else 1
    answers, shown = asyncio.run(serve(config_of(drafter, setting), nodes, setting == "kill", asked, limit))
    outcome = judged(answers, shipped_reference(file))
    cases = len({each.name for each, _ in answers} - {""})
    result = {"drafter": drafter, "setting": setting, "cases": cases, **outcome.counts, **shown}
    if outcome.first_problem:
        name = outcome.first_problem.split()[1]
        only = f" --only {name}" if "/" in name else ""
        result["first_problem"] = outcome.first_problem
        result["again"] = f"--drafter {drafter} --setting {setting}{only}"
    return result


def names_of(first: int, schemas: int) -> Iterator[str]:
    for number in range(first, first + schemas):
        yield f"schema/{number}"
        if number % TEXT_EVERY == 0:
            yield f"text/{number // TEXT_EVERY}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first schema")
    parser.add_argument("--only", nargs="+", help="names of cases, instead of these schemas")
    parser.add_argument("--drafter", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--setting", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="send nothing after that, per cluster"
    )
    options = parser.parse_args()
    names = options.only or list(names_of(options.first, options.schemas))
    failed = False
    for drafter, setting in itertools.product(options.drafter, options.setting):
        result = run(drafter, setting, names, options.seconds)
        print(json.dumps(result, ensure_ascii=False), flush=True)
        failed = failed or any(result.get(kind) for kind in ("invalid", "wrong", "errors"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
