"""Checks tool calls of clusters that lose nodes and pages: valid, and token for token those of a masked reference.

    python -m tests.cluster.check_tool_calls [--chats 100] [--first 0] [--drafter none ...] [--setting kill ...]

Every chat has a drawn question, in some with the results of its calls, and tools that the answer may call, must call,
or whose schemas are strict; half of them limit the tokens of reasoning. It is asked for twice: greedily and whole, and
streamed with a seed at temperature 1. The calls of an answer must be those that its tokens spell, and fit the declared
schemas unless the model chooses freely. The settings are those of check_grammars. It prints a line of JSON per cluster;
the exit code is 1 if there is a problem.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tests.cluster.asked_calls import Judge, asked_chats
from tests.cluster.checked_clusters import ClusterCheck
from tests.cluster.constrained_answers import Config
from tests.cluster.harness import ROOT
from tests.cluster.killed_nodes import KILLS, TREE, cluster_config, serve, small_pool
from tests.cluster.masked_reference import shipped_reference

SMALL_POOL = 1024  # tokens: some of the requests at once
TINY_MODELS = ROOT / "deploy" / "tiny_models"
EAGLE3: Config = {
    "algorithm": "eagle3",
    "draft_model_path": str(TINY_MODELS / "tiny-tools-eagle3"),
    "steps": 5,
}
# Name -> the section `speculation`
DRAFTERS: dict[str, Config] = {
    "none": {},
    "ngram": {"algorithm": "ngram", "steps": 4},
    "eagle3": EAGLE3,
    "eagle3-tree": EAGLE3 | TREE,
    "eagle3-adaptive": EAGLE3 | {"adaptive": "auto"},
    "standalone": EAGLE3
    | {"algorithm": "standalone", "draft_model_path": str(TINY_MODELS / "tiny-tools-standalone")},
}
SETTINGS: dict[str, Config] = {
    "1p1d": {},
    "retraction": small_pool(SMALL_POOL),
    "kill": KILLS,
    "kill-retraction": KILLS | small_pool(SMALL_POOL),
}


def run(drafter: str, setting: str, names: Sequence[str], limit: float) -> Config:
    """Return the results of one cluster."""
    config = cluster_config("tools", {}, SETTINGS[setting]) | {"speculation": DRAFTERS[drafter]}
    kill = setting.startswith("kill")
    asked = [each for name in names for each in asked_chats(name)]
    answers, shown = asyncio.run(serve(config, 2 if kill else 1, kill, asked, limit))
    judge = Judge(shipped_reference("tools"))
    for each, (status, body) in answers:
        judge.judge(each, status, body)
    chats = len({each.name for each, _ in answers})
    result = {"drafter": drafter, "setting": setting, "chats": chats, **judge.counts, **shown}
    if judge.first_problem:
        result["first_problem"] = judge.first_problem
        result["again"] = f"--drafter {drafter} --setting {setting} --only {judge.first_problem.split()[1]}"
    return result


def names_of(first: int, chats: int) -> list[str]:
    return [f"call/{number}" for number in range(first, first + chats)]


def main() -> int:
    return ClusterCheck(__doc__ or "", "chat", names_of, DRAFTERS, SETTINGS, run).main()


if __name__ == "__main__":
    sys.exit(main())
