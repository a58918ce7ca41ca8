"""`python -m tests.chaos.run`: runs a cluster under load with faults from a seed, and judges the recording.

Exit code 0 if every invariant holds, 1 if one is violated or too few faults of a kind were made, 2 if the run itself
failed, also if it leaves something behind that does not end. SIGINT and SIGTERM end it in order; what happened until
then is written and judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import traceback
from pathlib import Path

from tests.chaos import check, history
from tests.chaos.cluster import new_run_directory
from tests.chaos.ending import EXIT_FAILED, end_tasks, exit_within
from tests.chaos.experiment import Experiment
from tests.chaos.faults import KINDS
from tests.chaos.load import GIVE_UP
from tests.chaos.report import summary, too_few

EXIT_SECONDS = 30.0  # for threads that are left when all is written


class LeftBehind(Exception):
    """Tasks of the run ignore their cancellation."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/chaos/run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are injected")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--transport", default="tcp", choices=("tcp", "shm"))
    parser.add_argument("--algorithm", default="eagle3")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument(
        "--give-up", type=float, default=GIVE_UP, help="seconds without an answer after which a client leaves"
    )
    parser.add_argument(
        "--kinds", type=_kinds, default=None, help="kinds of faults, separated by commas; default: all"
    )
    parser.add_argument(
        "--links", default="", help="disturb only links whose names end in this: peer or bulk"
    )
    parser.add_argument("--undo", choices=("R1", "R2"), default=None, help="remove this fix from the product")
    parser.add_argument(
        "--until-hang", action="store_true", help="end when a request hangs, without a search for leaks"
    )
    parser.add_argument("--no-images", action="store_true", help="serve a model that takes no pictures")
    parser.add_argument("--no-batches", action="store_true", help="do not compare the throughput")
    parser.add_argument(
        "--no-namespaces", action="store_true", help="run as on a machine that cannot make network namespaces"
    )
    parser.add_argument("--directory", type=Path, default=None, help="directory of logs and history")
    return parser.parse_args(arguments)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


async def until_signal(experiment: Experiment) -> None:
    """Run the experiment. The first SIGINT or SIGTERM cancels it; later ones do not interrupt the cleanup.

    Raises LeftBehind if a task that it started cannot be ended.
    """
    loop, task = asyncio.get_running_loop(), asyncio.create_task(experiment.run())

    def end(number: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, lambda: None)
        print(f"ended by {number.name}", flush=True)
        task.cancel()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, end, each)
    try:
        await task
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if left := await end_tasks(others):
            raise LeftBehind(f"tasks that ignore their cancellation: {'; '.join(left)}")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    directory = options.directory or new_run_directory()
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    experiment = Experiment(options, directory)
    failed = None
    # Closed at the end, when all is written: that can take for ever.
    runner = asyncio.Runner()
    try:
        runner.run(until_signal(experiment))
    except (Exception, asyncio.CancelledError) as error:
        traceback.print_exc()
        failed = repr(error)
    history.write(directory, experiment.history())
    recorded = history.read(directory)
    violations = check.check(recorded)
    result = summary(recorded, violations)
    if failed is not None:
        result["failed"] = failed
    (directory / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    complaints = "\n".join([*too_few(recorded), check.report(violations)]).strip()
    print(complaints or "clean", flush=True)
    exit_within(EXIT_SECONDS)
    runner.close()
    if failed is not None:
        return EXIT_FAILED
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
