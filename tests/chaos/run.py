"""`python -m tests.chaos.run`: a cluster under load, faults from a seed, and the checker's verdict.

Exit code 0 if every invariant holds, 1 if one is broken, 2 if the run itself failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos import check, history, namespaces, progress_rules, starvation, stations
from tests.chaos.cases import learn_answers, make_cases, with_stop_strings
from tests.chaos.cluster import ChaosCluster, Setup, new_run_directory
from tests.chaos.event_tail import EventTail
from tests.chaos.faults import Injector
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.violation import Violation
from tests.cluster.harness import Client

TAIL = 6.0  # seconds of load after the last fault
RECOVERY = 60.0  # seconds until all processes are up and idle after the last fault
SPARE_DESCRIPTORS = 8  # connections between processes come and go


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/chaos/run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are made")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--transport", default="tcp", choices=("tcp", "shm"))
    parser.add_argument("--algorithm", default="eagle3")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--process-weight", type=float, default=1.0, help="more or fewer kills and stops")
    parser.add_argument("--no-namespaces", action="store_true", help="as where they cannot be made")
    parser.add_argument("--directory", type=Path, default=None, help="where logs and the history go")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace, directory: Path) -> History:
    reason = "--no-namespaces" if options.no_namespaces else namespaces.missing()
    if reason is not None:
        print(f"only control links are disturbed: {reason}", flush=True)
    setup = Setup(options.prefill, options.decode, options.transport, options.algorithm, reason is None)
    cluster = ChaosCluster(directory, setup, options.seed)
    async with cluster:
        async with Client(cluster.url) as client:
            cases = make_cases(options.seed)
            answers = await learn_answers(client, cases)
            stops = with_stop_strings(cases, answers)
            answers |= await learn_answers(client, stops)
            await client.wait_idle()
        base = {name: cluster.descriptors(name) or 0 for name in cluster.names}
        load = Load(cluster.url, [*cases, *stops], options.clients, options.seed)
        tail = EventTail(cluster.events)
        injector = Injector(cluster, random.Random(options.seed), tail, options.process_weight)
        watch = asyncio.create_task(starvation.watch(cluster.timeline, cluster.serving))
        begun = time.monotonic()
        print(f"faults begin: {directory}", flush=True)
        load.start()
        not_recovered = []
        try:
            async with asyncio.timeout(options.minutes * 60 * 2 + 120):
                await injector.run(options.faults, options.minutes * 60)
        except TimeoutError:
            not_recovered.append(f"still impaired: {sorted(cluster.timeline.impaired)}")
        ended = time.monotonic()
        await asyncio.sleep(TAIL)
        await load.stop()
        leaks = await find_leaks(cluster, base)
        tail.close()
        orderly = [process.pid for process in cluster.processes.values()]
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    recorded = {
        "seed": options.seed,
        "setup": asdict(setup),
        "begun": begun,
        "ended": ended,
        "pairs": {f"{p}/{d}": cluster.parts_of_pair(p, d) for p, d in cluster.pairs},
        "leaks": leaks,
        "orderly": orderly,
        "not_recovered": [*not_recovered, *cluster.not_recovered],
        "detections": injector.detections,
        "restarts": injector.restarts,
    }
    known = {name: asdict(answer) for name, answer in answers.items()}
    return History(load.exchanges, cluster.timeline.notes, known, recorded)


async def find_leaks(cluster: ChaosCluster, base: dict[str, int]) -> list[str]:
    """What is still held once nothing runs."""
    leaks = []
    async with Client(cluster.url) as client:
        try:
            await cluster.wait_nodes(RECOVERY)
            await client.wait_idle(RECOVERY)
        except (AssertionError, aiohttp.ClientError, OSError) as error:
            leaks.append(f"not up and idle: {error!r}"[:2000])
    for name, before in base.items():
        now = cluster.descriptors(name)
        if now is None:
            leaks.append(f"{name} has ended by itself")
        elif now > before + SPARE_DESCRIPTORS:
            leaks.append(f"{name} has {now} open descriptors, {before} before the first fault")
    return leaks


def summary(recorded: History, violations: list[Violation]) -> dict[str, Any]:
    begun = [note for note in recorded.faults if note["event"] == "begin" and note["kind"] != "hold"]
    errors = Counter(each.error_code for each in recorded.exchanges if each.error_code is not None)
    detected: dict[str, list[float]] = {}
    for kind, role, seconds in recorded.run["detections"]:
        detected.setdefault(f"{kind} {role}", []).append(round(seconds, 3))
    return {
        "seed": recorded.run["seed"],
        "setup": recorded.run["setup"],
        "seconds": round(recorded.run["ended"] - recorded.run["begun"], 1),
        "faults": len(begun),
        "faults_by_kind": dict(Counter(note["kind"] for note in begun)),
        "stations_by_kind": stations.hits(
            recorded.events, [(note["t"], note["kind"], note["target"]) for note in begun]
        ),
        "requests": len(recorded.exchanges),
        "complete": sum(each.done for each in recorded.exchanges),
        "left": sum(each.left for each in recorded.exchanges),
        "broken": sum(bool(each.broken) for each in recorded.exchanges),
        "errors_by_code": dict(errors),
        "violations": dict(Counter(each.invariant for each in violations)),
        "longest_gap_s": round(progress_rules.longest_gap(recorded), 2),
        "detection_s": {name: {"max": max(each), "n": len(each)} for name, each in detected.items()},
        "restart_s": round(max(recorded.run["restarts"], default=0.0), 1),
        "starved_s": round(sum(note["seconds"] for note in recorded.faults if note["event"] == "starved"), 1),
        "leaks": len(recorded.run["leaks"]),
    }


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    directory = options.directory or new_run_directory()
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    recorded = asyncio.run(run(options, directory))
    history.write(directory, recorded)
    recorded = history.read(directory)
    violations = check.check(recorded)
    result = summary(recorded, violations)
    (directory / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    print(check.report(violations) or "clean")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
