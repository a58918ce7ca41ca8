"""Decides what to change: a pure function of the latest observations, what was done before, and the limits.

The pressure of a role is 1 where its target is just met. A role is short if its pressure was over 1 in the whole
window. A role can spare a node if, with one node less, its pressure would have stayed under `spare` all the time.
Between the two nothing happens, so that a change is not taken back by the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import linear_regression

from common.messages.identity import ROLES, Role

OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
OPPOSITE: dict[str, str] = {
    "prefill": "decode",
    "decode": "prefill",
    "prefill+": "prefill-",
    "prefill-": "prefill+",
    "decode+": "decode-",
    "decode-": "decode+",
}
# Prompts count as waiting if the predicted time of a queue is over this share of the target of first tokens. Without a
# queue, more nodes do not bring first tokens sooner.
QUEUE_SHARE = 0.1
# The share of a gap that grows in proportion to the requests of a node, until that was measured.
ASSUMED_GROWTH = 0.5
# It counts as measured once the most requests that were seen on a node are this many times the fewest.
SPREAD = 2.0
# A change that is taken back within this many cool-downs was a mistake: the next one needs a window twice as long.
REGRET = 10.0
MAX_CAUTION = 16


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node that is registered."""

    name: str
    role: Role
    up: bool  # takes requests; otherwise it starts, drains or changes its role
    movable: bool
    requests: int  # that it has


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster in one interval. Times are in seconds; None where nothing was measured."""

    at: float  # monotonic
    nodes: tuple[NodeSeen, ...]
    first_token: float | None  # quantile of first tokens, from the arrival of a request
    gap: float | None  # mean gap between the tokens of an answer
    queued: float  # mean over prefill nodes: predicted time until their queued prompts are computed
    busy: float | None  # mean over prefill nodes: share of the interval in which they computed
    running: float  # mean over decode nodes: requests that are generated
    pool_use: float  # mean over decode nodes: share of the pages that these requests hold
    waiting_for_room: int  # requests that wait at routers until decode nodes have pages
    # Kubernetes: replicas that are asked for, by role. Empty: nodes are only moved.
    replicas: Mapping[Role, int] = field(default_factory=dict)

    def count(self, role: Role) -> int:
        """Return the number of nodes of a role that take requests."""
        return sum(node.up and node.role == role for node in self.nodes)


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """The minimum and maximum number of nodes of a role."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Targets, dead bands and bounds."""

    first_token: float  # seconds
    gap: float  # seconds
    pool_share: float  # of the pages of decode nodes
    busy_share: float  # of the time of prefill nodes
    spare: float  # below 1
    window: int  # observations that have to agree
    cool_down: float  # seconds after a change, or an attempt
    roles: Mapping[Role, RoleLimits]


@dataclass(frozen=True, slots=True)
class Move:
    """Let a movable node change its role."""

    name: str
    role: Role  # the new one


@dataclass(frozen=True, slots=True)
class Scale:
    """Ask for a number of replicas."""

    role: Role
    replicas: int


# What a change does: the role that gets a node by a move, or whose replicas grow (+) or shrink (-).
Direction = str


@dataclass(frozen=True, slots=True)
class State:
    """The part of the past that decisions depend on."""

    changed_at: float = -math.inf  # when the last change, or attempt, ended
    last: Direction = ""  # of the last change
    # direction -> how many times as long a window a change needs
    caution: Mapping[Direction, int] = field(default_factory=dict)
    # (mean requests of a decode node, gap) of the latest observation of each class of such means
    gaps: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """At most one change, and why."""

    change: Move | Scale | None
    reason: str


def remember(state: State, seen: Observation) -> State:
    """Return the state after another observation."""
    if seen.gap is None or not seen.running:
        return state
    # Four classes to a doubling, so there are few of them.
    number = round(4 * math.log2(seen.running))
    return replace(state, gaps={**state.gaps, number: (seen.running, seen.gap)})


def direction_of(change: Move | Scale, latest: Observation) -> Direction:
    if isinstance(change, Move):
        return change.role
    return f"{change.role}{'+' if change.replicas > latest.replicas[change.role] else '-'}"


def after_change(state: State, direction: Direction, now: float, limits: Limits) -> State:
    """Return the state after a change that ended at `now`."""
    caution, last = dict(state.caution), state.last
    if last:
        soon = now < state.changed_at + REGRET * limits.cool_down
        factor = caution.get(last, 1)
        regretted = soon and direction == OPPOSITE[last]
        caution[last] = min(2 * factor, MAX_CAUTION) if regretted else max(factor // 2, 1)
    return replace(state, changed_at=now, last=direction, caution=caution)


def predicted_gap(seen: Observation, growth: float, state: State) -> float:
    """Return the gap that decode nodes with `growth` times the requests would have: a line through earlier ones."""
    gap, points = seen.gap or 0.0, tuple(state.gaps.values())
    requests = [number for number, _ in points]
    if not points or max(requests) < SPREAD * min(requests):
        return gap * (1.0 + ASSUMED_GROWTH * (growth - 1.0))
    slope, _ = linear_regression(requests, [each for _, each in points])
    # Neither do gaps shrink with more requests, nor do they grow faster than these.
    return min(max(gap + slope * seen.running * (growth - 1.0), gap), gap * growth)


def decide(window: Sequence[Observation], state: State, limits: Limits) -> Decision:
    """Return the change to make now. `window`: the latest observations, oldest first, at least one."""
    latest = window[-1]
    if pending := _pending(latest):
        return Decision(None, f"waiting: {pending}")
    if latest.at < state.changed_at + limits.cool_down:
        return Decision(None, "cooling down after the last change")
    since = [each for each in window if each.at > state.changed_at]
    decision = _agreed(since, limits.window, state, limits)
    if decision.change is None:
        return decision
    direction = direction_of(decision.change, latest)
    needed = limits.window * state.caution.get(direction, 1)
    cautious = _agreed(since, needed, state, limits)
    if cautious.change is None or direction_of(cautious.change, latest) != direction:
        return Decision(None, f"{decision.reason}, but such a change was soon taken back: {cautious.reason}")
    return decision


def _agreed(since: Sequence[Observation], needed: int, state: State, limits: Limits) -> Decision:
    """Return the change that the latest `needed` observations agree about."""
    recent, latest = since[-needed:], since[-1] if since else None
    if latest is None or len(recent) < needed:
        return Decision(None, f"{len(recent)} of {needed} observations since the last change")
    if any(each.count(role) != latest.count(role) for each in recent for role in ROLES):
        return Decision(None, "the number of nodes has changed within the window")
    short = [role for role in ROLES if all(pressure(each, role, limits) > 1.0 for each in recent)]
    spare = [role for role in ROLES if _can_spare(recent, role, state, limits)]
    if latest.replicas:
        return _scale(recent, short, spare, limits)
    return _move(latest, short, spare, limits)


def pressure(seen: Observation, role: Role, limits: Limits) -> float:
    """Return how hard a role works, where 1 just meets its target."""
    if role == "prefill":
        queue = seen.queued / limits.first_token
        if seen.first_token is None or seen.waiting_for_room:
            # A first token that waited for pages says nothing about prefill nodes.
            return queue
        late = seen.first_token / limits.first_token
        return max(queue, late if queue > QUEUE_SHARE else min(late, 1.0))
    if _full(seen, limits):
        return math.inf
    return max((seen.gap or 0.0) / limits.gap, seen.pool_use / limits.pool_share)


def pressure_with_one_less(seen: Observation, role: Role, state: State, limits: Limits) -> float:
    """Return the predicted pressure if the other nodes of the role had to do the work of one more."""
    count = seen.count(role)
    if count < 2:
        return math.inf
    growth = count / (count - 1)
    if role == "prefill":
        busy = 0.0 if seen.busy is None else seen.busy / limits.busy_share
        return max(busy, seen.queued / limits.first_token) * growth
    if _full(seen, limits):
        return math.inf
    return max(predicted_gap(seen, growth, state) / limits.gap, seen.pool_use * growth / limits.pool_share)


def _full(seen: Observation, limits: Limits) -> bool:
    """Return whether requests wait because decode nodes have too few pages.

    Pages are set aside before a prompt is computed: while prompts queue, it is their requests that hold them.
    """
    return seen.waiting_for_room > 0 and seen.queued <= limits.first_token


def _pending(seen: Observation) -> str:
    """Return what the last change is still waiting for."""
    coming = [node.name for node in seen.nodes if not node.up]
    if coming:
        return f"{', '.join(coming)} is not up"
    for role, wanted in seen.replicas.items():
        if seen.count(role) != wanted:
            return f"{seen.count(role)} of {wanted} {role} nodes are registered"
    return ""


def _can_spare(recent: Sequence[Observation], role: Role, state: State, limits: Limits) -> bool:
    if recent[-1].count(role) <= limits.roles[role].least:
        return False
    return all(pressure_with_one_less(each, role, state, limits) < limits.spare for each in recent)


def _move(latest: Observation, short: list[Role], spare: list[Role], limits: Limits) -> Decision:
    if not short:
        return Decision(None, "no role is short of nodes")
    if len(short) == 2:
        return Decision(None, "both roles are short of nodes: more nodes are needed")
    (role,) = short
    giver = OTHER[role]
    if giver not in spare:
        return Decision(None, f"{role} is short of nodes, and {giver} has none to spare")
    if latest.count(role) >= limits.roles[role].most:
        return Decision(None, f"{role} is short of nodes, and has {limits.roles[role].most}, the most")
    movable = [node for node in latest.nodes if node.role == giver and node.movable]
    if not movable:
        return Decision(None, f"{role} is short of nodes, and no {giver} node is movable")
    chosen = min(movable, key=lambda node: (node.requests, node.name))
    return Decision(Move(chosen.name, role), f"{role} is short of nodes, and {giver} can spare one")


def _scale(recent: Sequence[Observation], short: list[Role], spare: list[Role], limits: Limits) -> Decision:
    latest = recent[-1]
    growing = [role for role in short if latest.count(role) < limits.roles[role].most]
    if growing:
        role = max(growing, key=lambda each: pressure(latest, each, limits))
        return Decision(Scale(role, latest.replicas[role] + 1), f"{role} is short of nodes")
    if short:
        return Decision(None, f"{' and '.join(short)} is short of nodes, and has the most")
    if spare:
        role = spare[0]
        return Decision(Scale(role, latest.replicas[role] - 1), f"{role} can spare a node")
    return Decision(None, "no role is short of nodes or can spare one")
