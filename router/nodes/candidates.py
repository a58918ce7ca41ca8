"""Turns nodes into candidates, each with its predicted times for one prompt, by its load and the history."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.messages.identity import Role
from router.nodes.history import PlacementHistory
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import Candidate
from router.nodes.placement_rules import PlacementRules
from router.nodes.prefix_index import PrefixMatches
from router.nodes.prompt_times import rest_ms
from router.nodes.registry import Node


class CandidateMaker:
    """Makes the candidates for one prompt."""

    def __init__(self, history: PlacementHistory, rules: PlacementRules, prompt: PlacedPrompt) -> None:
        self._history = history
        self._rules = rules
        self.prompt = prompt
        self.session_nodes = history.sessions.nodes(prompt.session)  # incarnations, of both roles

    def of(
        self, role: Role, nodes: Sequence[Node], weights: Sequence[float], matches: PrefixMatches
    ) -> list[Candidate]:
        """Return one candidate per node, all of `role`. `matches` are those of the role."""
        if role == "decode":
            return [self._decode(node, weight, matches) for node, weight in zip(nodes, weights, strict=True)]
        queues = [node.rooms.ms for node in nodes]
        longest = min(queues, default=0.0) + self._rules.max_imbalance_ms
        return [
            self._prefill(node, weight, queue, matches if queue <= longest else None)
            for node, weight, queue in zip(nodes, weights, queues, strict=True)
        ]

    def linked(self, prefill: str, decode: Candidate) -> Candidate:
        """Return a decode node with the time of the transfer from a prefill node, given as incarnation."""
        ms = self._history.transfers.ms(prefill, decode.incarnation, decode.moved)
        return replace(decode, transfer_ms=ms) if ms else decode

    def _prefill(
        self, node: Node, weight: float, queue_ms: float, matches: PrefixMatches | None
    ) -> Candidate:
        """`matches`: None for a node whose queue is too long for what it holds to count."""
        tokens, cached, session_ms = self.prompt.tokens, 0, 0.0
        if matches is not None:
            cached = self._history.cached_tokens(matches, node, self.prompt)
            session_ms = self._session_ms(node)
        ready_ms = queue_ms + rest_ms(node.load.prompt_times, tokens, cached)
        return Candidate(
            node.name, node.incarnation, node.load, node.rooms.expected, ready_ms, weight, session_ms
        )

    def _decode(self, node: Node, weight: float, matches: PrefixMatches) -> Candidate:
        moved = self.prompt.tokens - self._history.cached_tokens(matches, node, self.prompt)
        return Candidate(
            node.name,
            node.incarnation,
            node.load,
            node.rooms.expected,
            0.0,
            weight,
            self._session_ms(node),
            moved,
            node.register.page_size,
            0.0,
            self._history.steps.time,
            node.counters.avg_spec_accept_length,
        )

    def _session_ms(self, node: Node) -> float:
        return self._rules.session_ms if node.incarnation in self.session_nodes else 0.0
