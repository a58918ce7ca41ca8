"""Checks constrained answers of clusters: valid by a validator, and token for token those of a masked reference.

    python -m tests.cluster.check_grammars [--schemas 100] [--first 0] [--drafter none ...] [--setting 1p1d ...]

Every random schema (tests/fakes/random_grammars.py) is asked for twice, greedily and with a seed at temperature 1; one
regex, choice, Lark or EBNF grammar comes with every eight schemas. In every second block of requests as many without a
constraint are between them. The settings: 1p1d; 2p2d; retraction, where decode pools are too small for all requests
at once; kill, where nodes of both roles are killed in turn and started again until all answers are there; both of them
together. It prints a line of JSON per cluster, with the first problem and how to run only that; the exit code is 1 if
there is one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.checked_clusters import ClusterCheck
from tests.cluster.constrained_answers import Config, Questions, judged
from tests.cluster.killed_nodes import KILLS, TREE, cluster_config, serve, small_pool
from tests.cluster.masked_reference import shipped_reference

TEXT_EVERY = 8
SMALL_POOL = 512  # tokens: some of the requests at once
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
    "retraction": small_pool(SMALL_POOL),
    "kill": KILLS,
    "kill-retraction": KILLS | small_pool(SMALL_POOL),
}


def run(drafter: str, setting: str, names: Sequence[str], limit: float) -> Config:
    """Return the results of one cluster."""
    file, more = DRAFTERS[drafter]
    config = cluster_config(file, more, SETTINGS[setting])
    asked = Questions(Path(config["model"]["path"])).all(names)
    kill = setting.startswith("kill")
    nodes = 2 if kill or setting == "2p2d" else 1
    answers, shown = asyncio.run(serve(config, nodes, kill, asked, limit))
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
    return ClusterCheck(__doc__ or "", "schema", names_of, DRAFTERS, SETTINGS, run).main()


if __name__ == "__main__":
    sys.exit(main())
