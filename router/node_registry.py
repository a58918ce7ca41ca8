"""Who is in the cluster: nodes register themselves, heartbeats carry their load, silence makes them lost.

(unknown) ──Register──> up ──Drain or heartbeat says so──> draining ──Goodbye──> gone
                         └──────── no heartbeat, hung loop, closed socket ──────> lost (forgotten)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from common.messages.identity import NodeCounters, NodeLoad, NodeState, Role
from common.messages.router_inbox import Heartbeat, Register
from common.observability.logs import Log
from router.placement import Candidate, PlacementPolicy


@dataclass(slots=True)
class Node:
    """One incarnation of one node."""

    register: Register
    seen: float  # monotonic seconds of the last sign of life
    state: NodeState = "up"
    load: NodeLoad = field(default_factory=NodeLoad)
    counters: NodeCounters = field(default_factory=NodeCounters)
    loop_age: float = 0.0
    as_of: float = 0.0  # Unix seconds of its host: when load and counters were so
    rooms: dict[int, int] = field(default_factory=dict)  # room -> prompt tokens not computed yet

    @property
    def name(self) -> str:
        return self.register.node.name

    @property
    def incarnation(self) -> str:
        return self.register.node.incarnation

    @property
    def routing_id(self) -> str:
        """Of its control link."""
        return self.register.node.routing_id

    @property
    def role(self) -> Role:
        return self.register.node.role

    def candidate(self) -> Candidate:
        return Candidate(self.name, self.incarnation, self.load, len(self.rooms), sum(self.rooms.values()))


class NodeRegistry:
    """Changes are announced through callbacks, so that requests of a lost node hear of it at once."""

    def __init__(
        self,
        fingerprint: str,
        node_timeout: float,
        loop_timeout: float,
        clock: Callable[[], float],
        log: Log,
        on_lost: Callable[[Node, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._node_timeout = node_timeout
        self._loop_timeout = loop_timeout
        self._clock = clock
        self._log = log
        self._on_lost = on_lost
        self._on_change = on_change
        self._nodes: dict[str, Node] = {}  # incarnation -> node

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, incarnation: str) -> Node | None:
        return self._nodes.get(incarnation)

    def register(self, message: Register) -> str | None:
        """Take a node in. Returns None, or a sentence that says why it is refused."""
        node = message.node
        if message.model_fingerprint != self._fingerprint:
            return (
                f"{node.name} serves a model with fingerprint {message.model_fingerprint[:12]}, this router "
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
        for other in self:
            if other.name == node.name and other.incarnation != node.incarnation:
                self.lose(other, "a new process registered under its name")
        if node.incarnation not in self._nodes:
            self._nodes[node.incarnation] = Node(message, self._clock())
            self._log.info(
                "node registered", peer=node.name, role=node.role, incarnation=node.incarnation[:8]
            )
            self._on_change()
        return None

    def heartbeat(self, message: Heartbeat) -> bool:
        """False if the incarnation is not known: it has to register."""
        node = self._nodes.get(message.incarnation)
        if node is None:
            return False
        changed = node.state != message.state
        node.seen = self._clock()
        node.state, node.load, node.counters = message.state, message.load, message.counters
        node.loop_age, node.as_of = message.loop_age_ms / 1000, message.as_of
        if changed:
            self._on_change()
        return True

    def leave(self, incarnation: str) -> None:
        """The node said goodbye: whatever it still held is lost like a dead node's."""
        node = self._nodes.get(incarnation)
        if node is not None:
            self.lose(node, "it said goodbye")

    def lose(self, node: Node, reason: str) -> None:
        """Forget a node and end what it holds."""
        if self._nodes.pop(node.incarnation, None) is not None:
            self._log.warning(
                "node lost", peer=node.name, role=node.role, reason=reason, requests=len(node.rooms)
            )
            self._on_lost(node, reason)
            self._on_change()

    def sweep(self, stalled: float = 0.0) -> None:
        """Lose nodes that are silent or hung. `stalled`: seconds in which nobody listened: they are no silence."""
        now = self._clock()
        for node in self:
            node.seen = min(node.seen + stalled, now)
            if now - node.seen > self._node_timeout:
                self.lose(node, f"no heartbeat for {now - node.seen:.1f} s")
            elif node.loop_age > self._loop_timeout:
                self.lose(node, f"its main loop has not turned for {node.loop_age:.0f} s")

    def choose(self, role: Role, policy: PlacementPolicy, avoid: Container[str] = ()) -> Node | None:
        """A node of `role` that takes requests, one of `avoid` (incarnations) only if there is no other; or None."""
        candidates = [node.candidate() for node in self if node.role == role and node.state == "up"]
        candidates = [each for each in candidates if each.incarnation not in avoid] or candidates
        return self._nodes[policy.choose(candidates).incarnation] if candidates else None

    def count(self, role: Role) -> int:
        """Nodes of a role that take requests."""
        return sum(node.role == role and node.state == "up" for node in self)

    @property
    def max_model_len(self) -> int | None:
        """The least of all nodes; None without nodes."""
        return min((node.register.max_model_len for node in self), default=None)
