"""Builds what a decode node captures: the target's decode step, or the phases of a speculative round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.names import FULL, NONE
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.recorder import recorder_for
from common.engine.graphs.ladders import (
    decode_request_buckets,
    verify_request_buckets,
)
from common.engine.graphs.node_graphs import NodeGraphs, decided
from common.engine.graphs.rules import Decision, Phase, PhaseSwitch
from common.engine.state.relay_state import RelayState
from decode_node.graphs.decode_graph import DecodeGraphs, decode_spec
from decode_node.page_table import PageTable


def step_backend(name: str, device: torch.device) -> Backend:
    """Return a backend with a memory pool of its own, for one GraphRunner. Raises ValueError for an unknown name."""
    if name == NONE:
        return NoGraphs()
    if name == FULL:
        return FullGraphs(recorder_for(device))
    raise ValueError(f"a decode node has no graph backend {name!r}; write {NONE} or {FULL}")


def decode_graphs(
    runner: ModelRunner,
    relay: RelayState,
    page_table: PageTable,
    wanted: PhaseSwitch,
    max_running: int,
    max_model_len: int,
    hidden_states: bool = False,
) -> NodeGraphs[DecodeGraphs]:
    """Build the target's decode step, not captured yet. `hidden_states`: it returns them."""
    decision = decided(Phase.DECODE, runner.model.placement, wanted)
    buckets = decode_request_buckets(max_running) if decision.backend != NONE else ()
    spec = decode_spec(buckets, hidden_states=hidden_states)
    backend = step_backend(decision.backend, runner.model.placement.device)
    forward = DecodeGraphs(
        runner, relay, page_table, spec, backend, max_model_len, wanted.poisoned, hidden_states
    )
    return NodeGraphs(forward, decision)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The capture of one phase of a speculating node."""

    decision: Decision
    buckets: tuple[int, ...]  # numbers of requests; empty means always eager
    device: torch.device
    poisoned: bool = False  # debug option of `StaticInputs`

    def backend(self) -> Backend:
        """Create a capture backend with its own memory pool."""
        return step_backend(self.decision.backend, self.device)


def round_plans(
    runner: ModelRunner,
    wanted: PhaseSwitch,
    max_running: int,
    min_running: int = 1,
    buckets: Callable[[int], tuple[int, ...]] = verify_request_buckets,
) -> Callable[[Phase], PhasePlan]:
    """Return the capture plan of each phase: draft, verify and draft-extend are full graphs, decided independently.

    The plans cover batches of `min_running` to `max_running` requests; `buckets` returns the numbers of requests that
    are captured up to a largest one.
    """

    def plan(phase: Phase) -> PhasePlan:
        decision = decided(phase, runner.model.placement, wanted)
        ladder = buckets(max_running) if decision.backend != NONE else ()
        counts = tuple(count for count in ladder if count >= min_running)
        return PhasePlan(decision, counts, runner.model.placement.device, wanted.poisoned)

    return plan
