"""What placement remembers of nodes beyond their registration: links and nodes that failed, and nodes that are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.breaker import BreakerLimits, Breakers
from router.node_registry import Node

PairKey = tuple[str, str]  # incarnations of the prefill node and of the decode node
PAIR_LIMITS = BreakerLimits(failures=1, window=10.0, first_pause=1.0, longest_pause=30.0)
NODE_LIMITS = BreakerLimits(failures=5, window=10.0, first_pause=1.0, longest_pause=30.0)
LEAST_START_WEIGHT = 0.1  # of a node that has just come


class NodeHealth:
    """Weights and breakers of the nodes that are registered now; a lost node takes its history with it."""

    def __init__(self, slow_start: float, clock: Callable[[], float]) -> None:
        """`slow_start`: seconds over which the weight of a new node rises to 1."""
        self._slow_start = slow_start
        self._clock = clock
        self.pairs: Breakers[PairKey] = Breakers(PAIR_LIMITS, clock)
        self.nodes: Breakers[str] = Breakers(NODE_LIMITS, clock)

    def weights(self, nodes: Sequence[Node]) -> list[float]:
        """Weights of nodes of one role. They are equal until the first of them is past its slow start."""
        weights = [self.weight(node) for node in nodes]
        return weights if 1.0 in weights else [1.0] * len(weights)

    def weight(self, node: Node) -> float:
        """The share of requests that it should take compared with a node of weight 1."""
        age = self._clock() - node.since
        if age >= self._slow_start:
            return 1.0
        return LEAST_START_WEIGHT + (1.0 - LEAST_START_WEIGHT) * max(age, 0.0) / self._slow_start

    def placed(self, prefill: Node, decode: Node) -> None:
        """A request goes to this pair; it is the trial of breakers that are half-open."""
        self.pairs.placed((prefill.incarnation, decode.incarnation))
        self.nodes.placed(prefill.incarnation)
        self.nodes.placed(decode.incarnation)

    def transfer_failed(self, prefill: Node, decode: Node) -> None:
        self.pairs.failed((prefill.incarnation, decode.incarnation))

    def transferred(self, prefill: Node, decode: Node) -> None:
        """The pages of a request arrived."""
        self.pairs.succeeded((prefill.incarnation, decode.incarnation))

    def node_failed(self, node: Node) -> None:
        """The node broke a request by a fault of its own, or could not be sent to."""
        self.nodes.failed(node.incarnation)

    def node_served(self, node: Node) -> None:
        self.nodes.succeeded(node.incarnation)

    def released(self, prefill: Node, decode: Node) -> None:
        """A request on this pair is over, with whatever verdict was given before."""
        self.pairs.released((prefill.incarnation, decode.incarnation))
        self.nodes.released(prefill.incarnation)
        self.nodes.released(decode.incarnation)

    def lost(self, node: Node) -> None:
        gone = node.incarnation
        self.pairs.forget(lambda pair: gone in pair)
        self.nodes.forget(lambda key: key == gone)

    def describe(self, node: Node) -> dict[str, Any]:
        """For /server_info."""
        bad = sorted(pair for pair in self.pairs.blocked() if node.incarnation in pair)
        return {
            "weight": round(self.weight(node), 3),
            "breaker": self.nodes.state(node.incarnation),
            "bad_pairs": [pair[node.role == "prefill"] for pair in bad],
        }
