"""What a router that a test composes shows and records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.messages.identity import Role
from common.observability.event_log import NO_EVENTS
from common.observability.logs import Log
from router.metrics.router_metrics import RouterMetrics
from router.nodes.health import Condition
from router.nodes.registry import Node
from router.parts import Observation
from router.tracing.traces import NO_TRACES

MAX_MODEL_LEN = 1 << 20
MODEL = "tiny"


def observation(log: Log, clock: Callable[[], float] = time.monotonic) -> Observation:
    """Return an observation without events, traces and a run directory."""
    return Observation(
        log,
        MODEL,
        NO_EVENTS,
        {},
        max_model_len=MAX_MODEL_LEN,
        traces=NO_TRACES,
        profiles=_no_directory,
        clock=clock,
    )


def _no_directory() -> Path:
    raise ConfigError("process.run_dir", "this router has none")


def router_metrics(
    nodes: Callable[[], Iterable[Node]],
    refused: int = 0,
    conditions: Callable[[Iterable[Node]], Iterable[Condition]] = lambda nodes: (),
    configured: Mapping[Role, Sequence[str]] | None = None,
) -> RouterMetrics:
    """Return the metrics of a router that traces no request."""
    return RouterMetrics(
        MODEL,
        nodes,
        lambda: refused,
        conditions,
        MAX_MODEL_LEN,
        lambda timeline, figures: None,
        configured or {},
    )
