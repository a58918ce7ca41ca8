"""Membership of the cluster: nodes register, send heartbeats with their load, and count as lost when they fall silent.

A node to which sending fails is unreachable: it is not chosen until it is heard from again.

A name belongs to one process. While that process lives, another one that registers under the same name is refused; once
it is lost, the other one takes over. Until it is known which case holds, the other one gets no answer and asks again.
The same holds for a node that joins by a pattern of which there are as many nodes as the cluster file allows. A movable
node is two nodes of one name, one of each role, of which one is in standby.

(unknown) ──Register──> up ──heartbeat says so──> draining ──Goodbye──> gone
                         └─── no heartbeat, hung loop, closed socket ───> lost (forgotten)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple

from common.errors import UnknownNode
from common.messages.identity import ROLES, NodeCounters, NodeLoad, NodeState, OtherRouters, Role
from common.messages.router_inbox import Heartbeat, Register
from common.observability.logs import Log
from router.nodes.assigned_rooms import AssignedRooms
from router.nodes.placement import ANSWER_TOKENS
from router.nodes.prompt_times import UNKNOWN_MS, PromptTime, best_rate, prompt_time
from router.nodes.registration import Pattern
from router.nodes.return_watch import ReturnWatch

# How a node left. `closed` means that its socket closed, so most likely its process died.
LossCause = Literal["closed", "silent", "hung", "goodbye", "cut_off"]
# A heartbeat read this many seconds after another process asked for the name proves that the sender lives.
SIGN_OF_LIFE = 0.5
MAX_CONTENDERS = 8  # processes that may ask for the name of one node


@dataclass(slots=True)
class Node:
    """One incarnation of one node."""

    register: Register
    seen: float  # monotonic seconds when it was last heard from
    since: float = 0.0  # monotonic seconds when it registered
    state: NodeState = "up"
    load: NodeLoad = field(default_factory=NodeLoad)
    counters: NodeCounters = field(default_factory=NodeCounters)
    loop_age: float = 0.0
    announced: float = 0.0  # seconds that its main loop may take for one turn, as the node announced
    as_of: float = 0.0  # Unix seconds on its host at which load and counters were read
    others: OtherRouters = field(default_factory=OtherRouters)  # what they have on the node
    rooms: AssignedRooms = field(default_factory=AssignedRooms)
    # For rough estimates, from its last heartbeat:
    token_ms: float = UNKNOWN_MS  # of a prompt's token in large forwards (prefill nodes)
    answer_steps: float = ANSWER_TOKENS  # of an answer of this many tokens (decode nodes)
    reachable: bool = True  # False from a failed send to its next heartbeat or registration
    lost_by: LossCause | None = None  # set when it is lost
    pattern: str = ""  # of the cluster file, by which it joined; "" for a listed node
    # It is one half of a node that can change its role; the other half has the same name.
    movable: bool = False
    # incarnation -> when it first asked for the name
    contenders: dict[str, float] = field(default_factory=dict)
    # from its registration
    name: str = field(init=False)
    incarnation: str = field(init=False)
    role: Role = field(init=False)
    routing_id: str = field(init=False)  # its control link's
    control_link: bytes = field(init=False)  # the same, encoded

    def __post_init__(self) -> None:
        ref = self.register.node
        self.name, self.incarnation, self.role = ref.name, ref.incarnation, ref.role
        self.routing_id = self.register.link_id()
        self.control_link = self.routing_id.encode()

    @property
    def eligible(self) -> bool:
        """True if it takes requests and can be reached."""
        return self.state == "up" and self.reachable

    def prompt_time(self, tokens: int, cached: int = 0) -> PromptTime:
        """Return how long a prefill node computes a prompt, by its own times, if it holds `cached` tokens of it."""
        return prompt_time(self.load.prompt_times, tokens, cached)


class Pair(NamedTuple):
    """The two nodes of one attempt."""

    prefill: Node
    decode: Node


@dataclass(frozen=True, slots=True)
class EligibleNodes:
    """The nodes that take requests and can be reached."""

    of: Mapping[Role, Sequence[Node]]  # sorted by name
    mixed: Mapping[Role, Sequence[Node]]  # the same in a drawn order: neighbors have nothing in common
    oldest: Mapping[Role, float]  # monotonic seconds when the first of them registered
    newest: Mapping[Role, float]  # the same of the last one
    # Halves of movable nodes that decode now, each of which could compute prompts for itself.
    local: Sequence[Pair]
    only_pair: tuple[Node, Node] | None  # if there is one node of each role, so that nothing is to be chosen


class NodeRegistry:
    """The nodes of the cluster. Callbacks announce changes, so that requests on a lost node hear of it at once."""

    def __init__(
        self,
        fingerprint: str,
        node_timeout: float,
        loop_timeout: float,
        clock: Callable[[], float],
        log: Log,
        on_lost: Callable[[Node, str], None],
        on_change: Callable[[], None],
        returns: ReturnWatch | None = None,
    ) -> None:
        """`returns` knows the nodes of the cluster file; without it no node is expected back."""
        self._fingerprint = fingerprint
        self._node_timeout = node_timeout
        self._loop_timeout = loop_timeout
        self._clock = clock
        self._log = log
        self._on_lost = on_lost
        self._on_change = on_change
        self._returns = returns or ReturnWatch({}, 0.0, clock)
        self._nodes: dict[str, Node] = {}  # incarnation -> node
        self.get: Callable[[str], Node | None] = self._nodes.get
        # None after a change, until somebody asks.
        self._eligible: EligibleNodes | None = None
        self.version = 0  # changes whenever a node comes, leaves, changes its state or cannot be reached
        # Incarnations that have sent a heartbeat since somebody cleared the set (NodeRoom).
        self.heard: set[str] = set()
        self.max_model_len: int | None = None  # the smallest limit of all nodes; None without nodes
        self._served_at: dict[Role, float] = dict.fromkeys(ROLES, clock())  # when a node last took requests

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def node(self, incarnation: str) -> Node:
        """Return a registered node."""
        return self._nodes[incarnation]

    def named(self, name: str) -> list[Node]:
        """Return the node of this name; two of one that can change its role. Raises UnknownNode if there is none."""
        found = [node for node in self if node.name == name]
        if not found:
            known = ", ".join(sorted({node.name for node in self})) or "none"
            raise UnknownNode(f"no node {name!r} is registered here; there are: {known}", param="name")
        return found

    def eligible(self) -> list[Node]:
        """Return the nodes of both roles that take requests and can be reached."""
        return [node for node in self._nodes.values() if node.eligible]

    def eligible_among(self, role: Role, incarnations: Iterable[str]) -> Iterator[Node]:
        """Yield the nodes of a role that take requests and can be reached, of those that are given by incarnation."""
        for incarnation in incarnations:
            node = self._nodes.get(incarnation)
            if node is not None and node.eligible and node.role == role:
                yield node

    def eligible_by_role(self) -> EligibleNodes:
        """Return the nodes that take requests and can be reached. They are collected again only after a change."""
        if self._eligible is None:
            nodes = sorted(self.eligible(), key=lambda node: node.name)
            of: dict[Role, list[Node]] = {
                role: [node for node in nodes if node.role == role] for role in ROLES
            }
            prefills, decodes = of["prefill"], of["decode"]
            only_pair = (prefills[0], decodes[0]) if len(prefills) == len(decodes) == 1 else None
            oldest = {role: min((node.since for node in of[role]), default=math.inf) for role in ROLES}
            newest = {role: max((node.since for node in of[role]), default=-math.inf) for role in ROLES}
            # The same order after the same changes.
            mixed = {role: Random(0).sample(of[role], len(of[role])) for role in ROLES}
            self._eligible = EligibleNodes(of, mixed, oldest, newest, self._local_pairs(decodes), only_pair)
        return self._eligible

    def _local_pairs(self, decodes: Sequence[Node]) -> list[Pair]:
        waiting = {
            node.name: node
            for node in self._nodes.values()
            if node.role == "prefill" and node.state == "standby" and node.reachable
        }
        return [Pair(waiting[node.name], node) for node in decodes if node.name in waiting]

    def undecided(self, message: Register, pattern: Pattern | None = None) -> bool:
        """Return whether others hold what the node needs and one may be dead; its next heartbeat or its loss decides.

        A draining node holds its name, and its place in a pattern, until it has ended.
        """
        waits = [self._may_end(holder, message) for holder in self._holders(message, pattern)]
        return any(waits)

    def _may_end(self, holder: Node, message: Register) -> bool:
        """Return whether a node has given no sign of life since another process first asked for its place."""
        asked = holder.contenders
        if len(asked) >= MAX_CONTENDERS and message.node.incarnation not in asked:
            del asked[next(iter(asked))]
        since = asked.setdefault(message.node.incarnation, self._clock())
        return holder.state == "draining" or holder.seen < since + SIGN_OF_LIFE

    def register(
        self, message: Register, pattern: Pattern | None = None, movable: bool = False
    ) -> str | None:
        """Add a node, which joins by `pattern` or is listed. Returns None, or the reason for a refusal.

        A movable node is in standby until its heartbeat says in which role it serves.
        """
        node = message.node
        if message.model_fingerprint != self._fingerprint:
            return (
                f"{node.name} serves the model with fingerprint {message.model_fingerprint[:12]}, this router "
                f"{self._fingerprint[:12]}: start both from the same model directory"
            )
        for other in self:
            if other.role == node.role or other.name == node.name:
                continue
            if other.register.page_size != message.page_size:
                return (
                    f"{node.name} has pages of {message.page_size} tokens, {other.name} of "
                    f"{other.register.page_size}: set kv.page_size alike"
                )
        holders = self._holders(message, pattern)
        if holders and pattern is not None and holders[0].name != node.name:
            return (
                f"{len(holders)} nodes have joined as {pattern.text}, which is all that its count allows: raise count "
                f"in the cluster file, or end one before {node.name} starts"
            )
        if holders:
            where = holders[0].register
            return (
                f"{node.name} is already running as process {where.pid} on {where.host}: stop that one first, or "
                "start this one under another name of the cluster file"
            )
        known = self._nodes.get(node.incarnation)
        if known is not None:
            self._mark_seen(known)
        else:
            now = self._clock()
            name = "" if pattern is None else pattern.text
            state: NodeState = "standby" if movable else "up"
            self._nodes[node.incarnation] = Node(
                message, now, now, state=state, pattern=name, movable=movable
            )
            self._find_limit()
            self._returns.arrived(node.role, node.name)
            self._log.info(
                "node registered", peer=node.name, role=node.role, incarnation=node.incarnation[:8]
            )
            self._changed()
        return None

    def heartbeat(self, message: Heartbeat) -> bool:
        """Record a heartbeat. Return False if the incarnation is unknown, so that it has to register."""
        node = self._nodes.get(message.incarnation)
        if node is None:
            return False
        changed = node.state != message.state
        if changed:
            self._served(node)
        self._mark_seen(node)
        if message.load.prompt_times != node.load.prompt_times:
            node.token_ms, _ = best_rate(message.load.prompt_times)
        node.state, node.load, node.counters = message.state, message.load, message.counters
        node.loop_age, node.announced = message.loop_age_ms / 1000, message.announced_ms / 1000
        node.as_of, node.others = message.as_of, message.others
        node.rooms.heard(message.load, message.others)
        node.answer_steps = ANSWER_TOKENS / max(message.counters.avg_spec_accept_length, 1.0)
        self.heard.add(node.incarnation)
        if changed:
            self._changed()
        return True

    def leave(self, incarnation: str) -> None:
        """Remove a node that said goodbye: what it still held is lost, as with a dead node."""
        node = self._nodes.get(incarnation)
        if node is not None:
            self.lose(node, "it said goodbye", "goodbye")

    def unreachable(self, node: Node) -> None:
        """Mark a node to which sending failed: it is not chosen until it is heard from again."""
        if node.reachable:
            node.reachable = False
            self._forget_eligible()
            self._log.warning("node unreachable", peer=node.name, role=node.role)

    def lose(self, node: Node, reason: str, cause: LossCause) -> None:
        """Remove a node and end the requests that it holds."""
        if self._nodes.pop(node.incarnation, None) is not None:
            self.heard.discard(node.incarnation)
            self._find_limit()
            node.lost_by = cause
            self._served(node)
            self._returns.left(node.role, node.name)
            self._log.warning(
                "node lost", peer=node.name, role=node.role, reason=reason, requests=len(node.rooms)
            )
            self._forget_eligible()
            self._on_lost(node, reason)
            self._on_change()

    def sweep(self, stalled: float = 0.0) -> None:
        """Lose nodes that are silent or hung.

        `stalled`: seconds in which this process did not listen; they do not count.
        """
        now = self._clock()
        for node in self:
            node.seen = min(node.seen + stalled, now)
            if now - node.seen > self._node_timeout:
                self.lose(node, f"no heartbeat for {now - node.seen:.1f} s", "silent")
            elif node.loop_age > node.announced + self._loop_timeout:
                announced = f"{node.announced:.1f} s of work announced"
                self.lose(
                    node, f"its main loop has not turned for {node.loop_age:.1f} s, {announced}", "hung"
                )

    def expected_within(self, role: Role) -> float:
        """Return the seconds for which a node of `role` may be expected to take requests soon; 0 if none is expected.

        Expected are nodes of the cluster file that left or have not arrived yet, the successor of a draining node, and
        nodes that are unreachable now, because they either return or are lost.
        """
        back = any(
            node.role == role
            and node.state != "standby"
            and (not node.reachable or (node.state != "up" and self._returns.is_configured(role, node.name)))
            for node in self._nodes.values()
        )
        return math.inf if back else self._returns.remaining(role)

    def expected(self, role: Role) -> list[str]:
        """Return the names of nodes of the cluster file that are absent and expected back."""
        return self._returns.expected(role)

    def missing_for(self, role: Role) -> float:
        """Return the seconds since the last node of a role stopped taking requests; 0 while one takes them."""
        return self._clock() - self._served_at[role] if not self.count(role) else 0.0

    def count(self, role: Role) -> int:
        """Return the number of nodes of a role that take requests."""
        return sum(node.role == role and node.state == "up" for node in self)

    def _holders(self, message: Register, pattern: Pattern | None) -> list[Node]:
        """Return the nodes that keep this one out until one of them ends.

        That is the node of the same name, or all that have joined by its pattern if they are as many as it allows.
        """
        node = message.node
        others = [other for other in self if other.incarnation != node.incarnation]
        if same := [other for other in others if (other.name, other.role) == (node.name, node.role)]:
            return same
        joined = [] if pattern is None else [other for other in others if other.pattern == pattern.text]
        return joined if pattern is not None and len(joined) >= pattern.count else []

    def _served(self, node: Node) -> None:
        """Record the time until which the node took requests, before it leaves or changes its state."""
        if node.state == "up":
            self._served_at[node.role] = self._clock()

    def _mark_seen(self, node: Node) -> None:
        node.seen = self._clock()
        if not node.reachable:
            node.reachable = True
            self._changed()

    def _changed(self) -> None:
        self._forget_eligible()
        self._on_change()

    def _forget_eligible(self) -> None:
        self._eligible = None
        self.version += 1

    def _find_limit(self) -> None:
        self.max_model_len = min((node.register.max_model_len for node in self), default=None)
