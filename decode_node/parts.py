"""The parts of a decode node, in groups; build.py and tests create them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from common.garbage import NoCollections, TurnCollections
from common.grammar.grammars import NO_GRAMMARS, Grammars
from common.kv_cache.page_space import PageSpace
from common.kv_events.publisher import NO_KV_EVENTS, KvEvents
from common.messages.decode_inbox import DecodeMessage
from common.messages.identity import GraphTotals, RankTotals
from common.node.announced_work import NO_OTHERS, OtherLaunches
from common.node.profiles import NoProfiler, Profiler
from common.node.role_switch import FIXED_ROLE, CurrentRole
from common.node.router_links import RouterLinks
from common.observability.event_log import NO_EVENTS, EventLog
from common.observability.logs import Log
from decode_node.batch_rows import BatchRows
from decode_node.draft_watch import DraftWatch, NoWatch
from decode_node.host_tier import DecodeTier, NoDecodeTier
from decode_node.limits import DecodeLimits
from decode_node.pacing import PacingCounters
from decode_node.peers import PeerConnections
from decode_node.retraction import Retraction
from decode_node.step_rules import StepRules
from kv_transfer.receiving import PageReceiver


@dataclass(frozen=True, slots=True)
class Links:
    """The sockets and peers that the node communicates with."""

    incarnation: str  # this node's
    routers: RouterLinks[DecodeMessage]
    peers: PeerConnections
    poller: zmq.Poller
    receiver: PageReceiver
    role: CurrentRole = FIXED_ROLE
    others: OtherLaunches = NO_OTHERS


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The state and rules of the scheduler."""

    space: PageSpace
    rows: BatchRows
    retraction: Retraction
    rules: StepRules
    limits: DecodeLimits
    grammars: Grammars = NO_GRAMMARS
    tier: DecodeTier = field(default_factory=NoDecodeTier)


@dataclass(frozen=True, slots=True)
class Observation:
    """The logs, metrics and events of the node, and the clock that it uses."""

    log: Log
    graphs: Callable[[], Sequence[GraphTotals]] = lambda: ()
    ranks: Callable[[], Sequence[RankTotals]] = lambda: ()
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # updated by the steps
    pacing: PacingCounters = field(default_factory=PacingCounters)  # updated by the worker
    drafts: DraftWatch = field(default_factory=NoWatch)
    clock: Callable[[], float] = time.monotonic
    events: EventLog = NO_EVENTS
    profiler: Profiler = field(default_factory=NoProfiler)
    garbage: TurnCollections = field(default_factory=NoCollections)
    kv_events: KvEvents = NO_KV_EVENTS
