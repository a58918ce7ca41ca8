"""The health of nodes, as far as placement considers it: breakers of nodes and pairs, speeds, slow start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.messages.identity import ROLES, Role
from router.nodes.breaker import BreakerLimits, Breakers
from router.nodes.outliers import Outliers
from router.nodes.registry import EligibleNodes, Node

PairKey = tuple[str, str]  # incarnations of the prefill node and of the decode node
PAIR_LIMITS = BreakerLimits(failures=1, window=10.0, first_pause=1.0, longest_pause=30.0)
# Corruption is intermittent: successes do not clear its failures, and the pair is avoided for longer.
CHECKSUM_LIMITS = BreakerLimits(failures=3, window=60.0, first_pause=30.0, longest_pause=600.0)
NODE_LIMITS = BreakerLimits(failures=5, window=10.0, first_pause=1.0, longest_pause=30.0)
MIN_START_WEIGHT = 0.1  # weight of a node that has just registered
JUDGED_EVERY = 0.25  # seconds between two comparisons of node speeds
MIN_PROMPT = 64  # tokens: shorter prompts say little about the speed of a node
MIN_ANSWER = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """The placement state of a node."""

    node: Node
    weight: float  # share of requests compared with a node of weight 1
    breaker: str  # closed, open or half-open
    seconds_per_token: float | None  # measured on requests; None before the first measurement
    bad_peers: list[str]  # nodes of the other role with which it is not paired now


class NodeHealth:
    """Weights and breakers of the registered nodes.

    The history of a lost node is dropped with it. Reports about it that arrive later are ignored, so no entry leaks.
    """

    def __init__(self, slow_start: float, clock: Callable[[], float]) -> None:
        """`slow_start`: seconds over which the weight of a new node rises to 1."""
        self._slow_start = slow_start
        self.clock = clock
        self.pairs: Breakers[PairKey] = Breakers(PAIR_LIMITS, clock)
        self.checksums: Breakers[PairKey] = Breakers(CHECKSUM_LIMITS, clock)
        self.nodes: Breakers[str] = Breakers(NODE_LIMITS, clock)
        self.outliers = Outliers(clock)
        self._judged: dict[Role, float] = {}  # time of the last comparison of speeds

    def weights(self, nodes: Sequence[Node], oldest: float) -> list[float]:
        """Relative shares of requests for some nodes of one role, each at most 1.

        `oldest`: when the first node of the role registered.
        """
        now = self.clock()
        warm_since = now - self._slow_start
        starts = [1.0 if node.since <= warm_since else self._start_weight(node, now) for node in nodes]
        if oldest > warm_since:
            # All nodes are new, as after the start of the cluster: none of them takes over from another.
            starts = [1.0] * len(nodes)
        if self.outliers.none:
            return starts
        return [
            start * self.outliers.weight(node.incarnation) for node, start in zip(nodes, starts, strict=True)
        ]

    def uniform(self, nodes: EligibleNodes) -> bool:
        """Return whether all nodes take equal shares: none is slow, newer than others of its role, or has failed."""
        now = self.clock()
        self.judge(nodes.of, now)
        warm_since = now - self._slow_start
        return (
            not self._failures
            and self.outliers.none
            and all(nodes.newest[role] <= warm_since or nodes.oldest[role] > warm_since for role in ROLES)
        )

    @property
    def _failures(self) -> bool:
        """True if anything has failed lately."""
        return bool(self.pairs.states or self.checksums.states or self.nodes.states)

    def judge(self, nodes: Mapping[Role, Sequence[Node]], now: float) -> None:
        """Compare the speeds of all nodes of each role, unless that was done a moment ago."""
        for role, of_role in nodes.items():
            if of_role and now - self._judged.get(role, -math.inf) >= JUDGED_EVERY:
                self._judged[role] = now
                self.outliers.judge([node.incarnation for node in of_role])

    def _start_weight(self, node: Node, now: float) -> float:
        """Return the weight of a node during its slow start."""
        progress = min(max((now - node.since) / self._slow_start, 0.0), 1.0)
        return MIN_START_WEIGHT + (1.0 - MIN_START_WEIGHT) * progress

    def placed(self, prefill: Node, decode: Node, room: int) -> None:
        """Note that a request was placed on this pair. It is the trial request of breakers that are half-open."""
        if not self._failures:
            return
        self.pairs.placed((prefill.incarnation, decode.incarnation), room)
        self.checksums.placed((prefill.incarnation, decode.incarnation), room)
        self.nodes.placed(prefill.incarnation, room)
        self.nodes.placed(decode.incarnation, room)

    def transfer_failed(self, prefill: Node, decode: Node) -> None:
        if not _lost(prefill, decode):
            self.pairs.failed((prefill.incarnation, decode.incarnation))

    def corrupted(self, prefill: Node, decode: Node) -> None:
        """Note that a page on the decode node differs from what the prefill node sent."""
        if not _lost(prefill, decode):
            self.checksums.failed((prefill.incarnation, decode.incarnation))

    def verified(self, prefill: Node, decode: Node) -> None:
        """Note that the decode node has verified the pages of a request and run it."""
        pair = (prefill.incarnation, decode.incarnation)
        if self.checksums.states and self.checksums.is_half_open(pair):
            self.checksums.succeeded(pair)

    def bad_pairs(self) -> set[PairKey]:
        """Return the pairs that placement should avoid."""
        if not (self.pairs.states or self.checksums.states):
            return set()
        return self.pairs.blocked() | self.checksums.blocked()

    def transferred(self, prefill: Node, decode: Node) -> None:
        """Note that the pages of a request have arrived."""
        if self.pairs.states:
            self.pairs.succeeded((prefill.incarnation, decode.incarnation))

    def node_failed(self, node: Node) -> None:
        """Note that the node failed a request through a fault of its own, or could not be reached."""
        if not _lost(node):
            self.nodes.failed(node.incarnation)

    def node_served(self, node: Node) -> None:
        if self.nodes.states:
            self.nodes.succeeded(node.incarnation)

    def prefilled(self, node: Node, seconds: float, tokens: int) -> None:
        """Measure a prefill of `tokens` prompt tokens that took `seconds`."""
        if tokens >= MIN_PROMPT and node.lost_by is None:
            self.outliers.measured(node.incarnation, seconds, tokens)

    def decoded(self, node: Node, seconds: float, tokens: int) -> None:
        """Measure a decode of `tokens` tokens that took `seconds`."""
        if tokens >= MIN_ANSWER and node.lost_by is None:
            self.outliers.measured(node.incarnation, seconds, tokens)

    def released(self, prefill: Node, decode: Node, room: int) -> None:
        """Note that a request on this pair is over, whether or not it reported success or failure."""
        if not self._failures:
            return
        self.pairs.released((prefill.incarnation, decode.incarnation), room)
        self.checksums.released((prefill.incarnation, decode.incarnation), room)
        self.nodes.released(prefill.incarnation, room)
        self.nodes.released(decode.incarnation, room)

    def lost(self, node: Node) -> None:
        gone = node.incarnation
        self.pairs.forget(lambda pair: gone in pair)
        self.checksums.forget(lambda pair: gone in pair)
        self.nodes.forget(lambda key: key == gone)
        self.outliers.forget(gone)

    def conditions(self, nodes: Iterable[Node]) -> list[Condition]:
        """Return the condition of each node, for status pages and metrics."""
        known = list(nodes)
        names = {node.incarnation: node.name for node in known}
        bad = self.bad_pairs()
        found: list[Condition] = []
        by_role = {role: [node for node in known if node.role == role] for role in ROLES}
        self.judge(by_role, self.clock())
        for role, of_role in by_role.items():
            oldest = min((node.since for node in of_role), default=math.inf)
            for node, weight in zip(of_role, self.weights(of_role, oldest), strict=True):
                peers = {pair[role == "prefill"] for pair in bad if node.incarnation in pair}
                found.append(
                    Condition(
                        node,
                        weight,
                        self.nodes.state(node.incarnation),
                        self.outliers.seconds_per_token(node.incarnation),
                        sorted(names[peer] for peer in peers if peer in names),
                    )
                )
        return found


def _lost(*nodes: Node) -> bool:
    return any(node.lost_by is not None for node in nodes)
