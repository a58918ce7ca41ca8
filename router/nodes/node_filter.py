"""Decides which nodes may get a request while some of many are new, slow or failing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

from router.nodes.health import NodeHealth
from router.nodes.placement import MIN_WEIGHT
from router.nodes.registry import EligibleNodes, Node


class FilteredNodes(NamedTuple):
    """The nodes of a sample that may get a request."""

    drawn: list[Node]  # of reduced weight: it is their turn
    full: list[Node]


class NodeFilter:
    """Tells which nodes may get one request.

    A node of reduced weight takes part in no more than its share of all choices: the least loaded of a sample is often
    a node that is new, or one that does not report how slow it is.
    """

    def __init__(
        self, health: NodeHealth, eligible: EligibleNodes, refused: Collection[str], rng: Random
    ) -> None:
        """`refused`: incarnations that must not get it."""
        self._health = health
        self._oldest = eligible.oldest
        self._refused = refused
        self._rng = rng

    def split(self, sample: Sequence[Node]) -> FilteredNodes:
        """Return the nodes of a sample, all of one role, that may get the request; perhaps none."""
        refused, drawn, full = self._refused, list[Node](), list[Node]()
        weights = self._health.weights(sample, self._oldest[sample[0].role])
        size = len(sample)
        for node, weight in zip(sample, weights, strict=True):
            if node.incarnation in refused:
                continue
            if weight >= 1.0:
                full.append(node)
            elif self._rng.random() * size < max(weight, MIN_WEIGHT):
                drawn.append(node)
        return FilteredNodes(drawn, full)

    def accepts(self, node: Node) -> bool:
        """Return whether a node may get the request for what it holds of the prompt: not if its weight is reduced."""
        return not self.refuses(node) and self._health.weights([node], self._oldest[node.role])[0] >= 1.0

    def refuses(self, node: Node) -> bool:
        return node.incarnation in self._refused
