"""Measures one or two servers: every load with every seed, by the same plan and the same prompts for each server.

The servers take turns and are never loaded at the same time, because they may share a machine, and this process would
be twice as busy. Each seed begins with another server, so that a slow drift of the machine meets all of them alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from common.errors import ConfigError
from deploy.load_generator.loads import Load
from deploy.load_generator.plan import PlannedRequest, PromptShape, PromptTokens, closed_plan
from deploy.load_generator.runs import (
    Answered,
    EarlyStop,
    Run,
    Server,
    closed_loop,
    no_collections,
    no_progress,
    open_loop,
)
from deploy.load_generator.stream import RequestTimes, stream_completion
from deploy.load_generator.summary import Limits, Summary, curve, doubts, summarise

WARM_UP = 1 << 32, 0  # the run of requests that do not count


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test."""

    label: str
    base: str  # the URL up to and including /v1
    model: str
    # Presents the server's key. All sessions may share one pool of connections.
    session: aiohttp.ClientSession


@dataclass(frozen=True, slots=True)
class Bodies:
    """Makes the bodies of requests."""

    vocabulary: int
    salt: int
    extra: dict[str, Any] = field(default_factory=dict)  # fields of every request

    def maker(self, model: str, run: tuple[int, int]) -> Callable[[PlannedRequest], bytes]:
        """Return the function that encodes the requests of one run: of a load, by its number, with a seed."""
        prompts = PromptTokens(self.vocabulary, self.salt, run)
        fixed = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
        fixed |= {"stream_options": {"include_usage": True}, **self.extra}

        def body(request: PlannedRequest) -> bytes:
            return msgspec.json.encode({"prompt": prompts.of(request), "max_tokens": request.output, **fixed})

        return body


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """All seeds of one load on one server."""

    target: str
    load: str
    summary: Summary  # of all seeds together
    seeds: dict[int, Summary]
    doubts: list[str]  # reasons not to trust it
    errors: list[str]  # different ones, in the order of their first appearance
    ttft_ms: list[float]  # quantiles at equal distances
    gap_ms: list[float]


@dataclass(slots=True)
class Measurement:
    """Servers, loads, seeds and limits, and the procedure that measures them."""

    targets: Sequence[Target]
    loads: Sequence[Load]
    seeds: Sequence[int]
    bodies: Bodies
    limits: Limits

    async def run(self, answered: Answered = no_progress) -> AsyncIterator[MeasuredLoad]:
        """Measure all loads; yield the results of a load for each server in turn."""
        for number, load in enumerate(self.loads):
            runs: dict[str, dict[int, Run]] = {target.label: {} for target in self.targets}
            for target, seed in turns(self.targets, self.seeds):
                runs[target.label][seed] = await self.run_seed(target, load, (number, seed), answered)
            for label, each in runs.items():
                yield self.measured(label, load.label, each)

    async def run_seed(
        self,
        target: Target,
        load: Load,
        run: tuple[int, int],
        answered: Answered = no_progress,
        early_stop: EarlyStop | None = None,
    ) -> Run:
        """Run a load once. `run`: the number of the load, which determines its prompts, and the seed."""
        server = self._server(target, run)
        plan = load.plan(run[1])
        with no_collections():
            if load.clients:
                return await closed_loop(server, plan, load.clients, answered)
            return await open_loop(server, plan, answered, early_stop)

    async def warm_up(self, count: int, shape: PromptShape) -> None:
        """Send requests that do not count, one at a time, to each server; their failures do not count either.

        Raises ConfigError if a server refuses all of them as invalid, as it would those that count.
        """
        for target in self.targets:
            sent = [await self.send_one(target, request) for request in closed_plan(count, shape, 0)]
            if sent and all(each.invalid for each in sent):
                raise ConfigError(target.label, f"refuses every request of the warm-up: {sent[-1].error}")

    async def send_one(self, target: Target, request: PlannedRequest) -> RequestTimes:
        """Send a request that does not count, and return its times."""
        server = self._server(target, WARM_UP)
        return await stream_completion(server.session, server.url, server.body(request))

    def _server(self, target: Target, run: tuple[int, int]) -> Server:
        return Server(target.session, f"{target.base}/completions", self.bodies.maker(target.model, run))

    def measured(self, target: str, load: str, runs: dict[int, Run]) -> MeasuredLoad:
        """Summarise the runs of one load, by seed, on one server."""
        whole = Run()
        for run in runs.values():
            whole.add(run)
        summary = summarise(whole, self.limits)
        answered = [each for each in whole.requests if not each.error]
        return MeasuredLoad(
            target=target,
            load=load,
            summary=summary,
            seeds={seed: summarise(run, self.limits) for seed, run in sorted(runs.items())},
            doubts=doubts(summary, self.limits),
            errors=list(dict.fromkeys(each.error for each in whole.requests if each.error)),
            ttft_ms=curve([1e3 * each.first for each in answered]),
            gap_ms=curve([1e3 * gap for each in answered for gap in each.gaps]),
        )


def turns(targets: Sequence[Target], seeds: Sequence[int]) -> Iterator[tuple[Target, int]]:
    """Yield (server, seed) in the order of the runs."""
    for index, seed in enumerate(seeds):
        first = index % len(targets)
        for target in (*targets[first:], *targets[:first]):
            yield target, seed
