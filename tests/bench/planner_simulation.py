"""Lets the planner work on a simulated cluster whose load shifts, and compares it with clusters that stay as they are.

    python -m tests.bench.planner_simulation [--nodes 8] [--seconds 300] [--phases 4] [--rate 26] [--out FILE]

Router, placement and planner are the real ones, on an event loop with a virtual clock (placement_simulation.py); nodes
are simulated. Long prompts with short answers and short prompts with long answers take turns. For each split of the
nodes, fixed or planned: first tokens, the mean gap of each answer, and goodput, the requests per second whose first
token came within FIRST_TOKEN and whose mean gap was at most GAP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any
from unittest import mock

import msgspec
from msgspec import structs

from common.messages.identity import Role
from common.observability.logs import Log
from deploy.cluster_sample import ClusterSample, read_sample
from deploy.load_generator.trace import BLOCK_TOKENS, TraceRequest
from deploy.planning.decision import OTHER, Move, Scale
from deploy.planning.observing import Observer
from deploy.planning.planner import Planner, PlannerLoop
from deploy.planning.settings import PlannerSettings, RoleRange
from router.http.client import View
from router.server_info import of_nodes
from tests.bench.placement_simulation import Answer, Simulation
from tests.bench.placement_traces import LogNormal
from tests.bench.simulated_nodes import BLOCK, DecodeSimulation, PrefillSimulation, VirtualLoop
from tests.fakes.placement_rules import DEFAULT_RULES

FIRST_TOKEN, GAP = 0.5, 0.0125  # seconds
SETTINGS = PlannerSettings(first_token_ms=1000 * FIRST_TOKEN, gap_ms=1000 * GAP, window=3, cool_down=10.0)
LOOK_SECONDS = 0.1  # interval at which a node that changes its role looks whether its requests have ended
SWITCH_SECONDS = 0.5  # from its last request to its first in the new role


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of the requests of a phase, in tokens."""

    prompt: LogNormal
    answer: LogNormal


PROMPT_HEAVY = Shape(LogNormal(8000, 12_000), LogNormal(60, 120))
DECODE_HEAVY = Shape(LogNormal(500, 1000), LogNormal(1400, 2200))


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one simulation. Times are in milliseconds."""

    split: str
    phase: str
    requests: int
    first_token_p50: float
    first_token_p90: float
    first_token_p99: float
    gap_p50: float
    gap_p90: float
    gap_p99: float
    goodput: float  # requests per second
    good_share: float
    changes: int


def shifting(seconds: float, phases: int, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the requests of phases that take turns, as a Poisson process. No two share a prefix."""
    rng, ids, now = Random(seed), count(1), 0.0
    while (now := now + rng.expovariate(rate)) < seconds * phases:
        shape = (PROMPT_HEAVY, DECODE_HEAVY)[int(now // seconds) % 2]
        prompt, answer = (max(int(each.draw(rng)), 16) for each in (shape.prompt, shape.answer))
        blocks = tuple(next(ids) for _ in range(-(-prompt // BLOCK_TOKENS)))
        yield TraceRequest(1000 * now, prompt, answer, blocks)


class MovableNode:
    """A prefill node and a decode node of which one is in use."""

    def __init__(self, prefill: PrefillSimulation, decode: DecodeSimulation, role: Role) -> None:
        self.halves: dict[Role, PrefillSimulation | DecodeSimulation] = {"prefill": prefill, "decode": decode}
        self.role = role
        self.halves[OTHER[role]].enter("standby")

    async def change(self, role: Role) -> None:
        """Finish the present requests, then take those of the other role."""
        leaving = self.halves[self.role]
        leaving.enter("draining")
        while leaving.requests:
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(SWITCH_SECONDS)
        leaving.enter("standby")
        self.role = role
        self.halves[role].enter("up")


class PlannedCluster:
    """A simulated cluster of movable nodes, as the planner sees and changes it: `Readings` and `Changer`."""

    def __init__(self, simulation: Simulation, split: Mapping[Role, int]) -> None:
        self.simulation = simulation
        roles: list[Role] = [role for role, number in split.items() for _ in range(number)]
        self.nodes = {
            f"node-{index}": MovableNode(prefill, decode, role)
            for index, (prefill, decode, role) in enumerate(
                zip(simulation.prefills, simulation.decodes, roles, strict=True)
            )
        }
        self.changes = 0

    async def read(self) -> dict[str, ClusterSample]:
        core = self.simulation
        described = of_nodes(core.health.conditions(core.cluster.registry), View.CLUSTER)["nodes"]
        shown = {each["name"]: each for each in described}
        nodes = [
            {**shown[half.node.name], "name": name, "movable": True}
            for name, node in self.nodes.items()
            for half in (node.halves[node.role],)
        ]
        answers = {
            "/server_info": msgspec.json.encode({"ready": True, "nodes": nodes}),
            "/metrics": (await core.metrics.render(""))[0],
        }
        return {"router": read_sample(answers.__getitem__, core.cluster.loop.time())}

    async def check(self, info: Mapping[str, Any]) -> None:
        pass

    async def replicas(self) -> Mapping[Role, int]:
        return {}

    async def apply(self, change: Move | Scale) -> str:
        assert isinstance(change, Move)
        await self.nodes[change.name].change(change.role)
        self.changes += 1
        return "changed"


async def _serve(
    simulation: Simulation,
    split: Mapping[Role, int],
    requests: Sequence[TraceRequest],
    settings: PlannerSettings | None,
) -> tuple[list[Answer], int]:
    cluster = PlannedCluster(simulation, split)
    task = None
    if settings is not None:
        planner = Planner(settings.limits(), Observer(settings.quantile, settings.least_requests))
        loop = PlannerLoop(planner, cluster, cluster, settings.interval, False, Log("simulation"))
        task = asyncio.create_task(loop.run())
    answers = await simulation.run(requests)
    if task is not None:
        assert not task.done(), task.exception()
        task.cancel()
    return answers, cluster.changes


def simulate(
    requests: Sequence[TraceRequest], split: Mapping[Role, int], settings: PlannerSettings | None = None
) -> tuple[list[Answer], int]:
    """Return the answers and the number of changes. `settings`: of the planner; None: the split stays as it is.

    Every node can have either role.
    """
    loop, nodes = VirtualLoop(), sum(split.values())
    try:
        with mock.patch("time.monotonic", loop.time):
            asyncio.set_event_loop(loop)
            simulation = Simulation(
                loop, nodes, nodes, "cache_aware", replace(DEFAULT_RULES, block_tokens=BLOCK)
            )
            return loop.run_until_complete(_serve(simulation, split, requests, settings))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def good(answer: Answer) -> bool:
    return answer.first - answer.due <= FIRST_TOKEN and answer.gap <= GAP


def row(split: str, phase: str, answers: Sequence[Answer], seconds: float, changes: int) -> Row:
    """Return the figures of some answers, whose requests were due within `seconds`."""
    firsts = quantiles([1000 * (each.first - each.due) for each in answers], n=100)
    gaps = quantiles([1000 * each.gap for each in answers], n=100)
    well = sum(map(good, answers))
    return Row(
        split=split,
        phase=phase,
        requests=len(answers),
        first_token_p50=round(firsts[49], 1),
        first_token_p90=round(firsts[89], 1),
        first_token_p99=round(firsts[98], 1),
        gap_p50=round(gaps[49], 2),
        gap_p90=round(gaps[89], 2),
        gap_p99=round(gaps[98], 2),
        goodput=round(well / seconds, 2),
        good_share=round(well / len(answers), 4),
        changes=changes,
    )


def rows(name: str, answers: Sequence[Answer], seconds: float, phases: int, changes: int) -> list[Row]:
    """Return one row for all phases, and one for those of each shape."""
    begun = min(each.due for each in answers)
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for each in answers:
        parts[int((each.due - begun) // seconds) % 2].append(each)
    whole = [row(name, "all", answers, seconds * phases, changes)]
    for shape, part, number in (
        ("prompt-heavy", parts[0], (phases + 1) // 2),
        ("decode-heavy", parts[1], phases // 2),
    ):
        if part:
            whole.append(row(name, shape, part, seconds * number, changes))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a phase")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--rate", type=float, default=26.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    half, quarter = options.nodes // 2, options.nodes // 4
    least = RoleRange(min=half - 1)
    cases: list[tuple[str, int, PlannerSettings | None]] = [
        ("half of the nodes each", half, None),
        ("three quarters prefill", options.nodes - quarter, None),
        ("three quarters decode", quarter, None),
        ("planner, from half each", half, SETTINGS),
        (
            f"planner, at least {half - 1} of each",
            half,
            structs.replace(SETTINGS, prefill=least, decode=least),
        ),
    ]
    requests = list(shifting(options.seconds, options.phases, options.rate, options.seed))
    found: list[Row] = []
    for name, prefill, settings in cases:
        split: dict[Role, int] = {"prefill": prefill, "decode": options.nodes - prefill}
        answers, changes = simulate(requests, split, settings)
        for each in rows(name, answers, options.seconds, options.phases, changes):
            found.append(each)
            print(json.dumps(asdict(each)), flush=True)
    if options.out:
        shown = {key: value for key, value in vars(options).items() if key != "out"}
        document = {
            "source": "tests.bench.planner_simulation",
            "options": shown,
            "settings": msgspec.to_builtins(SETTINGS),
        }
        document["rows"] = [asdict(each) for each in found]
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
