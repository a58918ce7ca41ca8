"""Composes a decode node from its parts. build.py makes the parts from a config, tests make their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from common.engine.forward.rotary_places import RotaryPlaces
from common.engine.graphs import node_graphs
from common.engine.state.draft_row import DraftShape
from common.engine.state.relay_state import RelayState
from common.grammar.grammars import NO_GRAMMARS, Grammars
from common.kv_cache.page_space import PageSpace
from common.node.host_lane import HostLane, host_lane
from common.node.host_share import HostShare
from common.node.overlap import Completion
from common.observability.logs import Log
from decode_node.backups import Backups
from decode_node.batch_rows import BatchRows
from decode_node.forwards import Forwards
from decode_node.host_fetches import AppliedFetches, HostFetches, HostMoves
from decode_node.host_parts import Tap, host_fetches, host_tier, untapped
from decode_node.host_tier import DecodeTier
from decode_node.limits import DecodeLimits
from decode_node.node import DecodeNode
from decode_node.pacing import Pacing
from decode_node.parts import Links, Observation, Scheduling
from decode_node.retraction import Retraction
from decode_node.step_result import Worker
from decode_node.worker import DeviceWorker


@dataclass(frozen=True, slots=True)
class Computation:
    """The node's steps, and its state on the device."""

    forwards: Forwards
    relay: RelayState
    completion: Callable[[], Completion]
    rotary: RotaryPlaces
    draft: DraftShape  # what travels with a request
    lane: HostLane | None = None  # copies pages of retracted requests; None: the usual one of the device
    host: HostShare | None = None  # for cached prefixes
    tap: Tap = untapped  # returns the observer of these
    # Makes the host memory of all ranks from that of rank 0.
    of_all: Callable[[HostFetches], AppliedFetches] = lambda own: own


@dataclass(frozen=True, slots=True)
class Assembly:
    """A node, and those of its parts that tests inspect."""

    node: DecodeNode
    rows: BatchRows
    retraction: Retraction
    backups: Backups
    pacing: Pacing
    tier: DecodeTier


def device_worker(computation: Computation, clock: Callable[[], float], host: HostMoves) -> DeviceWorker:
    """Compose what executes the plans of a node on one device; ranks that have no scheduler need only this."""
    parts, forwards = computation, computation.forwards
    lane = parts.lane or host_lane(forwards.pools[0].device)
    backups = Backups(forwards.pools, parts.relay, lane, clock)
    pacing = Pacing(forwards.mark, Log("pacing"))
    return DeviceWorker(forwards.steps, forwards.table, parts.relay, backups, parts.completion, pacing, host)


def assemble(
    links: Links,
    space: PageSpace,
    computation: Computation,
    limits: DecodeLimits,
    backup_bytes: int,
    observation: Observation,
    wrap: Callable[[Worker], Worker] = lambda worker: worker,
    grammars: Grammars = NO_GRAMMARS,
) -> Assembly:
    """Compose a node that has not started.

    Args:
        backup_bytes: bound of the host memory that holds retracted requests.
        wrap: returns the worker that the node talks to; by default the node talks to the device worker itself.
        grammars: compiles the grammars of requests; by default they are refused.
    """
    parts, forwards, steps = computation, computation.forwards, computation.forwards.steps
    rows, fetches = BatchRows(limits.max_running), parts.of_all(host_fetches(parts.host, observation.clock))
    worker = device_worker(computation, observation.clock, fetches)
    tier = host_tier(parts.host, fetches, space, rows, backup_bytes, parts.tap)
    retraction = Retraction(space, rows, parts.rotary, backup_bytes, worker.backups.size_of, tier)
    rules = replace(steps.rules, hidden_states=limits.hidden_states)
    node = DecodeNode(
        links,
        Scheduling(space, rows, retraction, rules, limits, grammars, tier),
        wrap(worker),
        parts.draft,
        replace(
            observation,
            graphs=node_graphs.totals(*forwards.graphs),
            phase_seconds=steps.phase_seconds,
            pacing=worker.pacing.counters,
        ),
    )
    return Assembly(node, rows, retraction, worker.backups, worker.pacing, tier)
