"""The parts of a prefill node in groups, built by build.py and by tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.garbage import NoCollections, TurnCollections
from common.grammar.grammars import NO_GRAMMARS, Grammars
from common.ipc import RouterSocket
from common.kv_cache.page_space import PageSpace
from common.kv_events.publisher import NO_KV_EVENTS, KvEvents
from common.messages.identity import GraphTotals, RankTotals
from common.messages.prefill_inbox import PrefillMessage
from common.node.announced_work import NO_OTHERS, OtherLaunches
from common.node.profiles import NoProfiler, Profiler
from common.node.role_switch import FIXED_ROLE, CurrentRole
from common.node.router_links import RouterLinks
from common.observability.event_log import NO_EVENTS, EventLog
from common.observability.logs import Log
from kv_transfer.ranks.sender_group import SenderGroup
from kv_transfer.sender import Sender
from kv_transfer.sending import PageSender
from prefill_node.forward_times import ForwardTimes
from prefill_node.host_tier import HostTier, NoHostTier
from prefill_node.images import Images
from prefill_node.limits import PrefillLimits
from prefill_node.pacing import NO_PACING, PromptPacing
from prefill_node.step_rules import PromptRules


@dataclass(frozen=True, slots=True)
class Links:
    """The links to other processes."""

    incarnation: str  # this node's
    routers: RouterLinks[PrefillMessage]
    peers: RouterSocket
    sender: Sender  # of this rank
    images: Images
    group: SenderGroup | None = None  # of all ranks, if there are several
    role: CurrentRole = FIXED_ROLE
    others: OtherLaunches = NO_OTHERS

    @property
    def transfers(self) -> PageSender:
        """The transfers of all ranks, about which the node decides."""
        return self.group or self.sender

    @property
    def reports(self) -> Sequence[int]:
        """Descriptors that are readable when another rank has reported something about transfers."""
        return () if self.group is None else self.group.descriptors


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The inputs of scheduling decisions."""

    space: PageSpace
    rules: PromptRules
    limits: PrefillLimits
    times: ForwardTimes
    grammars: Grammars = NO_GRAMMARS
    pacing: PromptPacing = NO_PACING
    tier: HostTier = field(default_factory=NoHostTier)
    max_forward_tokens: Callable[[], int | None] = lambda: None  # bounds forwards further than `times` does


@dataclass(frozen=True, slots=True)
class Observation:
    """Logs, metrics, events, and the clock of the node."""

    log: Log
    graphs: Callable[[], Sequence[GraphTotals]] = lambda: ()
    ranks: Callable[[], Sequence[RankTotals]] = lambda: ()
    clock: Callable[[], float] = time.monotonic
    events: EventLog = NO_EVENTS
    profiler: Profiler = field(default_factory=NoProfiler)
    garbage: TurnCollections = field(default_factory=NoCollections)
    kv_events: KvEvents = NO_KV_EVENTS
