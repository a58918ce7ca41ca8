"""One run: the undisturbed cluster, faults under load, recovery, and a check for leaks."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.chaos import answers_rules, leaks, namespaces, progress_rules, starvation
from tests.chaos.cases import Expected, learn_answers, make_cases, picture_cases, with_stop_strings
from tests.chaos.cluster import ChaosCluster, Setup
from tests.chaos.drawing import Drawer
from tests.chaos.ending import end_task
from tests.chaos.event_tail import EventTail
from tests.chaos.faults import KINDS, minimums
from tests.chaos.history import History
from tests.chaos.injector import Injector
from tests.chaos.load import Load
from tests.chaos.recovery_rules import SHARE, WITHIN
from tests.chaos.violation import Violation
from tests.cluster.harness import Client

TAIL = 6.0  # seconds of load after the last fault
BATCHES = 3  # measured in the undisturbed cluster
SPREAD_SECONDS, SPREAD_INTERVAL = 1.0, 0.02  # of short requests that reach every pair
Batch = tuple[float, float, int]  # (since, until, tokens)


class Experiment:
    """The run. `history` is complete after `run`; after an exception it covers the time until then."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        reason = "--no-namespaces" if options.no_namespaces else namespaces.missing()
        if reason is not None:
            print(f"only control links are disturbed: {reason}", flush=True)
        images = not options.no_images and options.algorithm in ("eagle3", "none")
        self._options = options
        self._setup = Setup(
            options.prefill,
            options.decode,
            options.transport,
            options.algorithm,
            reason is None,
            images,
            options.undo,
        )
        self._cluster = ChaosCluster(directory, self._setup, options.seed)
        self._answers: dict[str, Expected] = {}
        self._load: Load | None = None
        self._injector: Injector | None = None
        self._begun = self._ended = time.monotonic()
        self._before: list[Batch] = []
        self._after: list[Batch] = []
        self._leaks: list[str] = []
        self._orderly: list[int] = []
        self._not_recovered: list[str] = []

    async def run(self) -> None:
        """Run. Whatever it raises, all processes, namespaces and mounts are removed afterwards."""
        async with self._cluster as cluster:
            tail = EventTail(cluster.events)
            watch = asyncio.create_task(starvation.watch(cluster.timeline, cluster.serving))
            try:
                load = await self._undisturbed()
                held = leaks.take(cluster)
                if await self._hangs(self._disturbed(load, tail)):
                    for name in cluster.processes:
                        cluster.end_process(name)
                    return
                self._leaks += await leaks.find(cluster, held)
                await self._recovered(load)
                self._orderly = [process.pid for process in cluster.processes.values()]
            finally:
                if self._load is not None:
                    await self._load.abandon()
                tail.close()
                await end_task(watch)

    async def _undisturbed(self) -> Load:
        """Learn the answers and the speed of the undisturbed cluster."""
        options = self._options
        async with Client(self._cluster.url) as client:
            cases = make_cases(options.seed)
            if self._setup.images:
                cases += picture_cases()
            self._answers = await learn_answers(client, cases)
            stops = with_stop_strings(cases, self._answers)
            self._answers |= await learn_answers(client, stops)
            self._load = load = Load(
                self._cluster.url, [*cases, *stops], options.clients, options.seed, options.give_up
            )
            # Leaks are found by comparison: every pair must have its connections now.
            await load.burst(SPREAD_SECONDS, SPREAD_INTERVAL)
            for _ in range(0 if options.no_batches else BATCHES):
                self._before.append(await load.batch())
            await client.wait_idle()
        return load

    async def _disturbed(self, load: Load, tail: EventTail) -> None:
        options, cluster = self._options, self._cluster
        kinds = options.kinds or KINDS
        drawer = Drawer(cluster, random.Random(options.seed), options.faults, kinds, options.links)
        self._injector = Injector(cluster, drawer, tail, load)
        self._begun = time.monotonic()
        print(f"faults begin: {cluster.directory}", flush=True)
        load.start()
        try:
            async with asyncio.timeout(options.minutes * 60 * 2 + 120):
                await self._injector.run(options.minutes * 60)
        except TimeoutError:
            self._not_recovered.append(f"still impaired: {sorted(cluster.timeline.impaired)}")
        self._ended = time.monotonic()
        await asyncio.sleep(TAIL)
        await load.stop()

    async def _hangs(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` until it is done or, with --until-hang, a request hangs. Return whether one did."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=0.5)
                rules = answers_rules.check if working.done() else progress_rules.check
                if self._options.until_hang and self._violates(rules):
                    print("a request hung", flush=True)
                    self._ended = time.monotonic()
                    return True
            return False
        finally:
            await end_task(working)

    def _violates(self, rules: Callable[[History], list[Violation]]) -> bool:
        """Whether the requests that have ended violate the rules.

        During the faults these are the rules of a hang; after them those of answers, by which a request needs a
        terminal event: the bound of a hang does not apply to a machine that runs other things.
        """
        so_far = self.history()
        ended = [each for each in so_far.exchanges if each.ended]
        return bool(rules(replace(so_far, exchanges=ended)))

    async def _recovered(self, load: Load) -> None:
        """Run batches until one is as fast as before, or the time is over."""
        if self._options.no_batches:
            return
        usual = sorted(until - since for since, until, _ in self._before)[len(self._before) // 2]
        while time.monotonic() - self._ended < WITHIN:
            self._after.append(await load.batch())
            since, until, _ = self._after[-1]
            if until - since <= usual / SHARE:
                return

    def history(self) -> History:
        options = self._options
        everything = not options.kinds and not options.links
        injector, cluster = self._injector, self._cluster
        recorded: dict[str, Any] = {
            "seed": options.seed,
            "setup": asdict(self._setup),
            "begun": self._begun,
            "ended": max(self._begun, self._ended),
            "pairs": {f"{p}/{d}": cluster.parts_of_pair(p, d) for p, d in cluster.pairs},
            "minimums": minimums(options.faults) if everything else {},
            "batches_before": self._before,
            "batches_after": self._after,
            "leaks": self._leaks,
            "orderly": self._orderly,
            "not_recovered": [*self._not_recovered, *cluster.not_recovered],
            "detections": injector.detections if injector is not None else [],
            "restarts": injector.restarts if injector is not None else [],
        }
        known = {name: asdict(answer) for name, answer in self._answers.items()}
        exchanges = self._load.exchanges if self._load is not None else []
        return History(exchanges, cluster.timeline.notes, known, recorded)
