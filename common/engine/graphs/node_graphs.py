"""A node's graphs, whatever its role: tried for their size, captured, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.report import start_report, table
from common.engine.graphs.rules import Decision, Phase, PhaseSwitch, StartupFacts, decide
from common.engine.layers.placement import Placement
from common.messages.identity import GraphReport, GraphTotals
from common.observability.logs import Log

GRAPH_BYTES = 4 << 20  # one graph's nodes, which the driver keeps and torch does not see


class GraphForward(Protocol):
    """A forward that runs under graphs where they fit."""

    graphs: GraphRunner[Any, Any]


Forward = TypeVar("Forward", bound=GraphForward)


@dataclass(frozen=True, slots=True)
class NodeGraphs(Generic[Forward]):
    """`forward` is complete with or without graphs: without, it has no shapes and is always eager."""

    forward: Forward
    decision: Decision


def capture(node: NodeGraphs[Any], log: Log) -> None:
    """Capture all shapes; one that failed is logged with its reason, and runs eagerly, for the first time here.

    Under inductor nothing else has run our own kernels by then: they would compile at the first request.
    """
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    graphs.capture()
    if graphs.rows:
        log.debug("captured shapes", table=table(graphs.rows, graphs.compilation))
    told = report(node)
    if told.failed:
        log.warning("graphs not captured", phase=told.phase, model=told.model, failed=told.failed)
    graphs.run_missing()  # behind the log: where the eager run fails too, the capture's error tells more


def trial(build: Callable[[], Iterable[NodeGraphs[Any]]], reserved: Callable[[], int]) -> int:
    """Bytes that the graphs of `build` will take, with their static inputs. They are let go of again.

    The largest shape of each is captured, which sizes its pool, and one more, which the others are taken to be like.
    Raises torch.OutOfMemoryError where these do not fit.

    Args:
        reserved: bytes of the device that something alive lies in.
    """
    before = reserved()
    nodes = list(build())
    more = 0
    for node in nodes:
        runner: GraphRunner[Any, Any] = node.forward.graphs
        shapes = runner.spec.shapes
        runner.capture(shapes[-1:])
        largest = reserved()
        runner.capture(shapes[-2:-1])
        for row in runner.rows:
            if row.ran_out:
                raise torch.OutOfMemoryError(f"{row.phase} of {row.tokens} tokens: {row.error}")
        more += (reserved() - largest) * max(0, len(shapes) - 2)
        more += GRAPH_BYTES * len(shapes) * len(runner.spec.variants)
    return reserved() - before + more


def totals(*nodes: NodeGraphs[Any]) -> Callable[[], tuple[GraphTotals, ...]]:
    """What these forwards of one node have run, asked anew each time: one entry for each phase and model."""
    runners: list[GraphRunner[Any, Any]] = [node.forward.graphs for node in nodes]

    def now() -> tuple[GraphTotals, ...]:
        found: dict[tuple[str, str], GraphTotals] = {}
        for each in (runner.totals() for runner in runners):
            before = found.get((each.phase, each.model))
            found[each.phase, each.model] = each if before is None else _both(before, each)
        return tuple(found.values())

    return now


def _both(one: GraphTotals, other: GraphTotals) -> GraphTotals:
    """The same phase in two widths."""
    return GraphTotals(
        phase=one.phase,
        model=one.model,
        replays=one.replays + other.replays,
        fallbacks=dict(Counter(one.fallbacks) + Counter(other.fallbacks)),
        live_tokens=one.live_tokens + other.live_tokens,
        padded_tokens=one.padded_tokens + other.padded_tokens,
        captured=one.captured + other.captured,
        unused=one.unused + other.unused,
    )


def report(node: NodeGraphs[Any]) -> GraphReport:
    """Its row of the start-up table and of /server_info."""
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    decision = node.decision
    return start_report(graphs.spec, decision.backend, decision.reasons, graphs.rows, graphs.compilation)


def decided(phase: Phase, placement: Placement, wanted: PhaseSwitch, needs_host: bool = False) -> Decision:
    """Return what the rules make of the wish for one phase on this device."""
    return decide(phase, StartupFacts(placement.device.type, needs_host), wanted)
