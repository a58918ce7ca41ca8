"""What placement remembers of nodes beyond their registration: links and nodes that failed, and nodes that are new."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.messages.identity import Role
from router.breaker import BreakerLimits, Breakers
from router.node_registry import ROLES, Node
from router.outliers import Outliers

PairKey = tuple[str, str]  # incarnations of the prefill node and of the decode node
PAIR_LIMITS = BreakerLimits(failures=1, window=10.0, first_pause=1.0, longest_pause=30.0)
# corruption comes and goes, so successes in between clear nothing, and the pair is left out for longer
CHECKSUM_LIMITS = BreakerLimits(failures=3, window=60.0, first_pause=30.0, longest_pause=600.0)
NODE_LIMITS = BreakerLimits(failures=5, window=10.0, first_pause=1.0, longest_pause=30.0)
LEAST_START_WEIGHT = 0.1  # of a node that has just come
JUDGED_EVERY = 0.25  # seconds between two comparisons of speeds
LEAST_PROMPT = 64  # tokens: what shorter prompts take says little about the node
LEAST_ANSWER = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """What placement thinks of a node."""

    node: Node
    weight: float  # share of requests compared with a node of weight 1
    breaker: str  # closed, open or half-open
    seconds_per_token: float | None  # as requests have measured it; None: no request has
    bad_peers: list[str]  # names of nodes of the other role that it is not paired with now


class NodeHealth:
    """Weights and breakers of the nodes that are registered now.

    A lost node takes its history with it: what is reported of it afterwards is ignored, so that nothing stays behind.
    """

    def __init__(self, slow_start: float, clock: Callable[[], float]) -> None:
        """`slow_start`: seconds over which the weight of a new node rises to 1."""
        self._slow_start = slow_start
        self.clock = clock
        self.pairs: Breakers[PairKey] = Breakers(PAIR_LIMITS, clock)
        self.checksums: Breakers[PairKey] = Breakers(CHECKSUM_LIMITS, clock)
        self.nodes: Breakers[str] = Breakers(NODE_LIMITS, clock)
        self.outliers = Outliers(clock)
        self._judged: dict[Role, float] = {}  # when speeds were compared last

    def weights(self, nodes: Sequence[Node]) -> list[float]:
        """Shares of requests that the nodes of one role should take compared with each other, at most 1."""
        now = self.clock()
        if nodes and now - self._judged.get(nodes[0].role, -math.inf) >= JUDGED_EVERY:
            self._judged[nodes[0].role] = now
            self.outliers.judge([node.incarnation for node in nodes])
        warm_since = now - self._slow_start
        starts = [1.0 if node.since <= warm_since else self._start_weight(node, now) for node in nodes]
        if 1.0 not in starts:
            # all are new, as after the cluster's start: none of them takes over from another
            starts = [1.0] * len(nodes)
        if self.outliers.none:
            return starts
        return [
            start * self.outliers.weight(node.incarnation) for node, start in zip(nodes, starts, strict=True)
        ]

    def _start_weight(self, node: Node, now: float) -> float:
        """Of a node in its slow start."""
        progress = min(max((now - node.since) / self._slow_start, 0.0), 1.0)
        return LEAST_START_WEIGHT + (1.0 - LEAST_START_WEIGHT) * progress

    def placed(self, prefill: Node, decode: Node) -> None:
        """A request goes to this pair; it is the trial of breakers that are half-open."""
        self.pairs.placed((prefill.incarnation, decode.incarnation))
        self.checksums.placed((prefill.incarnation, decode.incarnation))
        self.nodes.placed(prefill.incarnation)
        self.nodes.placed(decode.incarnation)

    def transfer_failed(self, prefill: Node, decode: Node) -> None:
        if not _lost(prefill, decode):
            self.pairs.failed((prefill.incarnation, decode.incarnation))

    def corrupted(self, prefill: Node, decode: Node) -> None:
        """A page that the prefill node sent is not what the decode node has."""
        if not _lost(prefill, decode):
            self.checksums.failed((prefill.incarnation, decode.incarnation))

    def verified(self, prefill: Node, decode: Node) -> None:
        """The decode node has checked the pages of a request and ran it."""
        pair = (prefill.incarnation, decode.incarnation)
        if self.checksums.is_half_open(pair):
            self.checksums.succeeded(pair)

    def bad_pairs(self) -> set[PairKey]:
        """Pairs to avoid."""
        return self.pairs.blocked() | self.checksums.blocked()

    def transferred(self, prefill: Node, decode: Node) -> None:
        """The pages of a request arrived."""
        self.pairs.succeeded((prefill.incarnation, decode.incarnation))

    def node_failed(self, node: Node) -> None:
        """The node broke a request by a fault of its own, or could not be sent to."""
        if not _lost(node):
            self.nodes.failed(node.incarnation)

    def node_served(self, node: Node) -> None:
        self.nodes.succeeded(node.incarnation)

    def prefilled(self, node: Node, seconds: float, tokens: int) -> None:
        """The node computed so many tokens of a prompt."""
        if tokens >= LEAST_PROMPT and not _lost(node):
            self.outliers.measured(node.incarnation, seconds, tokens)

    def decoded(self, node: Node, seconds: float, tokens: int) -> None:
        """The node gave a request so many tokens."""
        if tokens >= LEAST_ANSWER and not _lost(node):
            self.outliers.measured(node.incarnation, seconds, tokens)

    def released(self, prefill: Node, decode: Node) -> None:
        """A request on this pair is over, with whatever verdict was given before."""
        self.pairs.released((prefill.incarnation, decode.incarnation))
        self.checksums.released((prefill.incarnation, decode.incarnation))
        self.nodes.released(prefill.incarnation)
        self.nodes.released(decode.incarnation)

    def lost(self, node: Node) -> None:
        gone = node.incarnation
        self.pairs.forget(lambda pair: gone in pair)
        self.checksums.forget(lambda pair: gone in pair)
        self.nodes.forget(lambda key: key == gone)
        self.outliers.forget(gone)

    def conditions(self, nodes: Iterable[Node]) -> list[Condition]:
        """For status pages and metrics."""
        known = list(nodes)
        names = {node.incarnation: node.name for node in known}
        bad = self.bad_pairs()
        found: list[Condition] = []
        for role in ROLES:
            of_role = [node for node in known if node.role == role]
            for node, weight in zip(of_role, self.weights(of_role), strict=True):
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
