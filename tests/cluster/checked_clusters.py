"""The command line of checks that run one cluster after another, for drafters, settings and numbered cases."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from tests.cluster.constrained_answers import Config

Run = Callable[[str, str, Sequence[str], float], Config]


@dataclass(frozen=True)
class ClusterCheck:
    """One check: its cases, and the clusters that it can run."""

    description: str
    case: str  # what the cases are, for --help
    names: Callable[[int, int], Iterable[str]]  # (first, count) -> the names of that many cases
    drafters: Collection[str]
    settings: Collection[str]
    # Returns the results of one cluster: drafter, setting, names of cases, seconds after which nothing more is sent.
    run: Run

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Print a line of JSON per cluster. Return the exit code: 1 if there was a problem."""
        options = self._options(arguments)
        names = options.only or list(self.names(options.first, options.cases))
        failed = False
        for drafter, setting in itertools.product(options.drafter, options.setting):
            result = self.run(drafter, setting, names, options.seconds)
            print(json.dumps(result, ensure_ascii=False), flush=True)
            failed = failed or any(result.get(kind) for kind in ("invalid", "wrong", "errors"))
        return 1 if failed else 0

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = parser.add_argument
        add(f"--{self.case}s", type=int, default=100, dest="cases")
        add("--first", type=int, default=0, help=f"number of the first {self.case}")
        add("--only", nargs="+", help="names of cases, instead of these")
        add("--drafter", nargs="+", choices=list(self.drafters), default=list(self.drafters))
        add("--setting", nargs="+", choices=list(self.settings), default=list(self.settings))
        add("--seconds", type=float, default=math.inf, help="send nothing after that, per cluster")
        return parser.parse_args(arguments)
