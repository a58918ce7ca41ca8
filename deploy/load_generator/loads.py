"""The loads that can be measured: Poisson arrivals, a closed loop, a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.errors import ConfigError
from deploy.load_generator.plan import (
    PlannedRequest,
    PromptShape,
    Replay,
    closed_plan,
    poisson_plan,
    trace_plan,
)
from deploy.load_generator.trace import read_trace

MIN_REQUESTS, REQUESTS_PER_CLIENT = 12, 4


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load."""

    label: str
    plan: Callable[[int], Sequence[PlannedRequest]]  # of a seed
    clients: int = 0  # of a closed loop; 0: an open loop


def open_load(rate: float, seconds: float, shape: PromptShape) -> Load:
    """Return Poisson arrivals, `rate` per second for `seconds`."""
    return Load(f"{rate:g}/s", partial(poisson_plan, rate, seconds, shape))


def closed_load(clients: int, requests: int | None, shape: PromptShape) -> Load:
    """Return a closed loop. Without `requests` it has 4 per client, at least 12."""
    count = requests or max(MIN_REQUESTS, REQUESTS_PER_CLIENT * clients)
    return Load(f"{clients} clients", partial(closed_plan, count, shape), clients)


def trace_load(file: Path, replay: Replay) -> Load:
    """Return a trace; a seed changes its tokens, not its times. Raises ConfigError."""
    plan = trace_plan(read_trace(file), replay)
    if not plan:
        raise ConfigError(str(file), "has no request within --seconds and --max-input")
    return Load(file.name, lambda seed: plan)
