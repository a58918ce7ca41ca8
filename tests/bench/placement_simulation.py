"""Compares placement policies in a simulation with a virtual clock: the real dispatcher, placer and registry of a
router, and simulated nodes.

    python -m tests.bench.placement_simulation [--nodes 4 64 256] [--seconds 180] [--out FILE] [--trace FILE]

Half of the nodes are prefill nodes. For each trace (placement_traces.py, or a file in Mooncake's format), number of
nodes and policy: the share of prompt tokens that were cached, first tokens, goodput (requests per second whose first
token came within FIRST_TOKEN and whose tokens took at most PER_TOKEN each). The arrival rate per prefill node is that
of the published trace, times `--load`. Requests of the first half are not counted, except for the hit rates. The option
`--processor` measures the router's processor time for placing a request instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any
from unittest import mock

import msgspec

from common.kv_cache.block_hashes import chain_start, token_bytes
from common.messages.generation import SamplingParams
from common.messages.identity import Role
from common.observability.event_log import NO_EVENTS
from common.observability.logs import Log
from deploy.load_generator.trace import TraceRequest, read_trace
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.generation import GenerationRequest
from router.dispatch.limits import DispatchLimits
from router.metrics.router_metrics import RouterMetrics
from router.nodes.health import NodeHealth
from router.nodes.history import PlacementHistory
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost, softened
from router.nodes.placement_rules import PlacementRules
from router.nodes.placer import Placer
from router.nodes.registry import NodeRegistry
from tests.bench.placement_traces import CONVERSATION, SHAPES, SessionRequest, statistics, trace
from tests.bench.simulated_nodes import (
    BLOCK,
    SCALE,
    Cluster,
    DecodeSimulation,
    PrefillSimulation,
    VirtualLoop,
)
from tests.fakes.observing import router_metrics
from tests.fakes.placement_rules import DEFAULT_RULES

FIRST_TOKEN = 2.0  # seconds
PER_TOKEN = 0.025
POLICIES = ("round_robin", "power_of_two", "least_loaded", "cache_aware", "cache_events")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one simulation; times in milliseconds."""

    trace: str
    nodes: int
    policy: str
    requests: int  # that were counted
    hit_rate: float  # of prefill nodes
    decode_hit_rate: float
    first_token_p50: float
    first_token_p90: float
    first_token_p99: float
    goodput: float  # requests per second
    good_share: float
    known_blocks: int  # of all routers
    routers: int
    seed: int  # of the trace
    temperature_ms: float
    sessions: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated beside a policy.

    Attributes:
        routers: processes among which requests are divided.
        temperature_ms: `router.placement.temperature_ms`.
        sessions: requests name their conversation, as with the header X-Session-Id.
    """

    routers: int = 1
    temperature_ms: float = 0.0
    sessions: bool = False


ONE_ROUTER = Setup()


@dataclass(frozen=True, slots=True)
class Placing:
    """The router's processor time for placing one request, without the garbage collector."""

    nodes: int
    policy: str
    requests: int
    microseconds: float


@dataclass(slots=True)
class Answer:
    """The times of one answer, in seconds of the virtual clock."""

    due: float
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0

    @property
    def gap(self) -> float:
        """The mean gap between two tokens."""
        return (self.end - self.first) / max(self.tokens - 1, 1)

    @property
    def good(self) -> bool:
        return self.first - self.due <= FIRST_TOKEN and self.gap <= PER_TOKEN


class _Timed:
    """Adds up the processor time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.process_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.process_time() - begun

        return timed


class Simulation:
    """Router processes and their nodes. All routers know the load of a node at once; prefixes each knows by itself."""

    def __init__(
        self,
        loop: VirtualLoop,
        prefills: int,
        decodes: int,
        policy: str,
        rules: PlacementRules,
        setup: Setup = ONE_ROUTER,
    ) -> None:
        """`prefills`, `decodes`: how many nodes there are of each role."""
        log, clock = Log("simulation"), loop.time
        self._setup = setup
        registry = NodeRegistry("f", 3.0, 3.0, clock, log, lambda node, why: None, lambda: None)
        self._prompts: dict[str, Sequence[int]] = {}
        self.cluster = Cluster(loop, registry, self._prompts.__getitem__)
        self.prefills = [PrefillSimulation(self.cluster, number) for number in range(prefills)]
        self.decodes = [DecodeSimulation(self.cluster, number) for number in range(decodes)]
        nodes = (*self.prefills, *self.decodes)
        self._by_link = {each.node.routing_id: each.receive for each in nodes}
        # Those of the router that was added last.
        self.health: NodeHealth
        self.metrics: RouterMetrics
        self.placing = _Timed()
        self.histories = [self._router(policy, number, rules) for number in range(setup.routers)]
        self._chosen = Random(2)  # which router a request arrives at

    def _router(self, policy: str, number: int, rules: PlacementRules) -> PlacementHistory:
        """Add a router process; return what it knows."""
        cluster, log = self.cluster, Log("simulation")
        rng, temperature = Random(1 + number), self._setup.temperature_ms
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy(policy, softened(prefill_cost, temperature, rng)),
            "decode": make_policy(policy, softened(decode_cost, temperature, rng)),
        }
        self.health = health = NodeHealth(0.0, cluster.loop.time)
        placer = Placer(cluster.registry, policies, health, rng, rules)
        history = placer.history
        limits = DispatchLimits(
            max_attempts=3,
            max_requests=1 << 20,
            request_timeout=3600.0,
            placement_wait=10.0,
            retry_ratio=0.2,
            queue_wait=3600.0,
            max_crashes=2,
            reserved_tokens=256,
            first_token_hold=0.0,
            requests_per_node=1 << 20,
        )
        self.metrics = router_metrics(lambda: cluster.registry, conditions=health.conditions)
        dispatcher = Dispatcher(
            cluster.registry, placer, self._send_all, limits, self.metrics, log, health, NO_EVENTS
        )
        cluster.dispatchers.append(dispatcher)
        if history.reported.roles:
            cluster.reported.append(history.reported)
            history.reported.following.update(node.incarnation for node in cluster.registry)
        for owner, name in ((placer, "choose"), (placer, "prompt"), (history, "placed")):
            setattr(owner, name, self.placing.around(getattr(owner, name)))
        return history

    async def run(self, requests: Sequence[TraceRequest]) -> list[Answer]:
        """Send the requests at their times; return their answers in the same order."""
        loop = self.cluster.loop
        begun, tasks = loop.time(), []
        for number, each in enumerate(requests):
            due = begun + each.timestamp / 1000
            await asyncio.sleep(due - loop.time())
            tasks.append(loop.create_task(self._ask(f"r{number}", each, due)))
        return [await task for task in tasks]

    async def _ask(self, name: str, request: TraceRequest, due: float) -> Answer:
        whole = request.input_length // (SCALE * BLOCK)
        blocks = request.hash_ids[:whole]
        tokens = [block for block in blocks for _ in range(BLOCK)]
        tokens += [0] * max(request.input_length // SCALE - len(tokens), 1)
        self._prompts[name] = blocks
        if self.cluster.reported:
            chain = chain_start().extended(token_bytes(tokens), BLOCK)
            self.cluster.hashes.update(zip(blocks, chain.hashes))
        sampling = SamplingParams(max_tokens=max(request.output_length, 2), temperature=0.0)
        answer = Answer(due)
        # Clients of their own: turns of fair shares are another subject.
        asked = GenerationRequest(name, tokens, sampling, client=name, session=self._session(request))
        router = self._chosen.choice(self.cluster.dispatchers)
        async for delta in router.generate(asked):
            answer.first = answer.first or self.cluster.loop.time()
            answer.tokens += len(delta.tokens)
        answer.end = self.cluster.loop.time()
        del self._prompts[name]
        return answer

    def _session(self, request: TraceRequest) -> bytes:
        """Return what the request names as its session."""
        if not self._setup.sessions or not isinstance(request, SessionRequest):
            return b""
        return b"%d" % request.conversation

    def _send_all(self, peer: str, messages: Sequence[msgspec.Struct]) -> int:
        for message in messages:
            # Messages arrive in a later turn, as over a socket.
            self.cluster.loop.call_soon(self._by_link[peer], message)
        return len(messages)


def _run(
    requests: Sequence[TraceRequest], nodes: int, policy: str, setup: Setup
) -> tuple[list[Answer], Simulation]:
    """Simulate all requests on a cluster of its own."""
    loop = VirtualLoop()
    rules = replace(DEFAULT_RULES, block_tokens=BLOCK)
    try:
        with mock.patch("time.monotonic", loop.time):
            asyncio.set_event_loop(loop)
            simulation = Simulation(loop, nodes // 2, nodes - nodes // 2, policy, rules, setup)
            answers = loop.run_until_complete(simulation.run(requests))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return answers, simulation


def simulate(
    requests: Sequence[TraceRequest], nodes: int, policy: str, setup: Setup = ONE_ROUTER
) -> dict[str, Any]:
    """Return the values of a `Row`, without the name and the seed of the trace."""
    answers, simulation = _run(requests, nodes, policy, setup)
    span = requests[-1].timestamp / 1000
    counted = [each for each in answers if each.due - answers[0].due >= span / 2]
    firsts = quantiles([1000 * (each.first - each.due) for each in counted], n=100)
    good = sum(each.good for each in counted)
    tallies = simulation.cluster.tallies
    return {
        "nodes": nodes,
        "policy": policy,
        "requests": len(counted),
        "hit_rate": round(tallies["prefill"].rate, 4),
        "decode_hit_rate": round(tallies["decode"].rate, 4),
        "first_token_p50": round(firsts[49], 1),
        "first_token_p90": round(firsts[89], 1),
        "first_token_p99": round(firsts[98], 1),
        "goodput": round(good / (span / 2), 2),
        "good_share": round(good / len(counted), 4),
        "known_blocks": sum(history.blocks for history in simulation.histories),
        **asdict(setup),
    }


def placing(nodes: int, policy: str) -> Placing:
    """Measure the placement of some two thousand requests of the conversation trace.

    The collector is off, because the objects of thousands of simulated streams would be counted as placement.
    """
    rate = CONVERSATION.rate * 0.7 * (nodes // 2)
    requests = list(trace(CONVERSATION, rate, 2000 / rate, 1))
    gc.disable()
    try:
        _, simulation = _run(requests, nodes, policy, ONE_ROUTER)
    finally:
        gc.enable()
    microseconds = round(1e6 * simulation.placing.seconds / len(requests), 1)
    return Placing(nodes, policy, len(requests), microseconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--seconds", type=float, nargs="+", default=[1200.0, 240.0, 120.0])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--routers", type=int, default=1, help="processes among which requests are divided")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="each in turn, ms")
    parser.add_argument("--sessions", action="store_true", help="requests name their conversation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of synthetic traces, each in turn")
    parser.add_argument("--traces", nargs="+", default=[*SHAPES])
    parser.add_argument(
        "--load", type=float, default=1.0, help="rate, relative to that of the published trace"
    )
    parser.add_argument("--trace", type=Path, help="a trace file, whose rate is taken as it is")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processor", action="store_true", help="only measure the router's processor time")
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    if options.processor:
        measured = [placing(nodes, policy) for nodes in options.nodes for policy in options.policies]
        print(json.dumps([asdict(each) for each in measured], indent=1))
        return
    rows, shapes = list[Row](), dict[str, dict[str, float]]()
    setups = [Setup(options.routers, each, options.sessions) for each in options.temperatures]
    sizes = zip(options.nodes, options.seconds, strict=True)
    traces = [str(options.trace)] if options.trace else options.traces
    for name, (nodes, seconds), seed in itertools.product(traces, sizes, options.seeds):
        requests: Sequence[TraceRequest]
        if options.trace:
            requests = list(read_trace(options.trace))
        else:
            shape = SHAPES[name]
            requests = list(trace(shape, shape.rate * options.load * (nodes // 2), seconds, seed))
        if seed == options.seeds[0]:
            shapes[f"{name}, {nodes} nodes"] = statistics(requests)
        for policy, setup in itertools.product(options.policies, setups):
            row = Row(trace=name, seed=seed, **simulate(requests, nodes, policy, setup))
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
    if options.out:
        # More rows of the same measurement may follow from another call.
        before = json.loads(options.out.read_text()) if options.out.exists() else {"traces": {}, "rows": []}
        before["traces"] |= shapes
        before["rows"] += [asdict(row) for row in rows]
        options.out.write_text(json.dumps(before, indent=1) + "\n")


if __name__ == "__main__":
    main()
