"""A node's graphs, for either role: sized by a trial, captured, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from common.engine.graphs.backends.base import Recording
from common.engine.graphs.backends.names import BREAKABLE, FULL
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.report import start_report, table
from common.engine.graphs.rules import Decision, Phase, PhaseSwitch, StartupFacts, decide
from common.engine.graphs.spec import GraphKey, ShapeKey
from common.engine.layers.placement import Placement
from common.engine.ops.compile_ahead import KernelsAhead
from common.engine.ops.triton_kernel import COMPILE_ERRORS
from common.messages.identity import GraphReport, GraphTotals
from common.observability.logs import Log
from common.observability.start_progress import progressed

# Backends whose captures launch kernels; those of piecewise graphs are prepared by torch.compile.
LAUNCHING = (FULL, BREAKABLE)
GRAPH_BYTES = 4 << 20  # per graph: its nodes, which the driver stores and torch does not count


class GraphForward(Protocol):
    """A forward that replays graphs for the batches that fit."""

    graphs: GraphRunner[Any, Any]


Forward = TypeVar("Forward", bound=GraphForward)


@dataclass(frozen=True, slots=True)
class NodeGraphs(Generic[Forward]):
    """A forward and its decision. Without graphs `forward` has no shapes and always runs eagerly."""

    forward: Forward
    decision: Decision


def capture(
    node: NodeGraphs[Any],
    log: Log,
    common: Callable[[Sequence[GraphKey]], Sequence[GraphKey]] = lambda own: own,
) -> None:
    """Capture all shapes. A shape that fails is logged with its reason and then run eagerly once.

    That eager run matters under inductor: nothing else has run tandem's own kernels by then, and they would compile
    at the first request.

    Args:
        common: returns which of the captured graphs all ranks of the node have.
    """
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    graphs.capture()
    graphs.keep(common(graphs.captured))
    if graphs.rows:
        log.debug("captured shapes", table=table(graphs.rows, graphs.compilation))
    failures = report(node)
    if failures.failed:
        log.warning("graphs not captured", phase=failures.phase, model=failures.model, failed=failures.failed)
    # Runs after the log: if the eager run fails too, the capture's error is the informative one.
    graphs.run_missing()


class CompilePass:
    """Records graphs within `compiling_ahead`, which compiles what they launch, and drops them.

    What is missed, because a capture fails or a shape is not recorded here, compiles when it is first launched.
    """

    def __init__(self, kernels: KernelsAhead, nodes: Iterable[NodeGraphs[Any]], log: Log) -> None:
        self._kernels = kernels
        self._log = log
        self._runners: list[GraphRunner[Any, Any]] = [
            node.forward.graphs
            for node in nodes
            if node.decision.backend in LAUNCHING and node.forward.graphs.spec.shapes
        ]
        self._kept: list[Recording[Any]] = []

    def largest(self) -> None:
        """Record the largest shape of each graph."""
        for runner in self._runners:
            self._record(runner, runner.keys(runner.spec.shapes[-1:]))

    def others(self) -> None:
        """Record all other shapes, with one sampling variant: the others differ in few kernels."""
        for runner in self._runners:
            self._record(runner, runner.keys(runner.spec.shapes[:-1])[:: len(runner.spec.variants)])

    def _record(self, runner: GraphRunner[Any, Any], keys: Iterable[GraphKey]) -> None:
        for key in keys:
            try:
                self._kept.append(runner.record(key))
            except COMPILE_ERRORS as failure:
                phase, model, error = runner.spec.phase, runner.spec.model, str(failure).splitlines()[0]
                self._log.debug("not compiled ahead", phase=phase, model=model, key=str(key), error=error)
            self._kernels.collect()
            progressed("compiling what graphs launch")


def trial(build: Callable[[], Iterable[NodeGraphs[Any]]], reserved: Callable[[], int]) -> int:
    """Return the bytes that the graphs of `build` and their static inputs will take. The graphs are released again.

    For each forward the shapes that size its pool are captured (`sizing_shapes`), and one more shape, whose size is
    assumed for all others. Raises torch.OutOfMemoryError if these do not fit.

    Args:
        reserved: returns the bytes of the device that are in use.
    """
    before = reserved()
    nodes = list(build())
    more = 0
    for node in nodes:
        runner: GraphRunner[Any, Any] = node.forward.graphs
        shapes = runner.spec.shapes
        runner.capture(sizing_shapes(shapes))
        largest = reserved()
        runner.capture(shapes[-2:-1])
        for row in runner.rows:
            if row.ran_out:
                raise torch.OutOfMemoryError(f"{row.phase} of {row.tokens} tokens: {row.error}")
        more += (reserved() - largest) * max(0, len(shapes) - 2)
        more += GRAPH_BYTES * len(shapes) * len(runner.spec.variants)
    return reserved() - before + more


def sizing_shapes(shapes: Sequence[ShapeKey]) -> list[ShapeKey]:
    """Return the largest shape, and the largest one that limits requests.

    Where larger graphs do not limit requests, attention is at their breaks. Smaller ones without breaks may take more
    memory, since it includes that of attention.
    """
    limited = [shape for shape in shapes if shape.requests]
    return sorted({*shapes[-1:], *limited[-1:]})


def totals(*nodes: NodeGraphs[Any]) -> Callable[[], tuple[GraphTotals, ...]]:
    """Return a function that gives the current totals of these forwards: one entry per phase and model."""
    runners: list[GraphRunner[Any, Any]] = [node.forward.graphs for node in nodes]

    def now() -> tuple[GraphTotals, ...]:
        found: dict[tuple[str, str], GraphTotals] = {}
        for each in (runner.totals() for runner in runners):
            before = found.get((each.phase, each.model))
            found[each.phase, each.model] = each if before is None else _both(before, each)
        return tuple(found.values())

    return now


def _both(one: GraphTotals, other: GraphTotals) -> GraphTotals:
    """Add the totals of one phase that is captured in two widths."""
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
    """Return the node's row of the start-up table and of /server_info."""
    graphs: GraphRunner[Any, Any] = node.forward.graphs
    decision = node.decision
    return start_report(graphs.spec, decision.backend, decision.reasons, graphs.rows, graphs.compilation)


def decided(phase: Phase, placement: Placement, wanted: PhaseSwitch, needs_host: bool = False) -> Decision:
    """Return what the rules decide for one phase on this device."""
    return decide(phase, StartupFacts(placement.device.type, needs_host), wanted)
