"""Lets a movable decode node compute a short prompt itself where that gives the next tokens sooner.

Such a node has a prefill half in standby, which takes prompts for its own decode half only. The pages then move within
one process, and the prompt waits for no prefill node, but it shares the device with the steps of the decode half.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from common.messages.identity import ROLES
from router.nodes.candidates import CandidateMaker
from router.nodes.health import NodeHealth
from router.nodes.history import PlacementHistory
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import Candidate, decode_cost, decode_requests, prefill_cost
from router.nodes.registry import Pair

MAX_COMPARED = 8  # nodes whose halves are compared for one prompt


class LocalPrefill:
    """Compares a chosen pair with the halves of movable nodes, by predicted milliseconds."""

    def __init__(self, history: PlacementHistory, health: NodeHealth, max_tokens: int, rng: Random) -> None:
        """`max_tokens`: of a prompt that are not cached; 0: every prompt goes to a prefill node."""
        self._history = history
        self._health = health
        self._max_tokens = max_tokens
        self._rng = rng

    @property
    def enabled(self) -> bool:
        return self._max_tokens > 0

    def instead(
        self,
        pair: Pair,
        local: Sequence[Pair],
        avoid: Collection[str],
        prompt: PlacedPrompt,
        maker: CandidateMaker,
    ) -> Pair:
        """Return `pair`, or the halves of a movable node that are predicted to give the second token sooner.

        Args:
            local: the halves of the movable nodes that decode now.
            avoid: incarnations that must not be used.
            maker: of candidates for this prompt.
        """
        usable = self._usable(local, avoid)
        if not usable or prompt.images:
            return pair
        matches = {role: self._history.matches(role, prompt) for role in ROLES}
        pairs = [pair, *usable]
        prefills = maker.of("prefill", [p.prefill for p in pairs], [1.0] * len(pairs), matches["prefill"])
        decodes = maker.of("decode", [p.decode for p in pairs], [1.0] * len(pairs), matches["decode"])
        best = prefill_cost(prefills[0]) + decode_cost(maker.linked(pair.prefill.incarnation, decodes[0]))
        chosen = pair
        for each, prefill, decode in zip(usable, prefills[1:], decodes[1:], strict=True):
            cached = self._history.cached_tokens(matches["prefill"], each.prefill, prompt)
            cost = local_cost(prefill, decode)
            if prompt.tokens - cached <= self._max_tokens and cost < best:
                best, chosen = cost, each
        return chosen

    def _usable(self, local: Sequence[Pair], avoid: Collection[str]) -> Sequence[Pair]:
        """Return the pairs that may be compared: healthy ones, and of many a sample."""
        if len(local) > MAX_COMPARED:
            local = self._rng.sample(local, MAX_COMPARED)
        refused = {*avoid, *self._health.nodes.blocked()}
        bad = self._health.bad_pairs()
        return [
            pair
            for pair in local
            if not refused.intersection(node.incarnation for node in pair)
            and (pair.prefill.incarnation, pair.decode.incarnation) not in bad
        ]


def local_cost(prefill: Candidate, decode: Candidate) -> float:
    """Return the predicted milliseconds of a pair of halves, comparable with the sum of both costs of another pair.

    The prompt waits for the running step of the decode half. Nothing is transferred between devices.
    """
    return prefill_cost(prefill) + decode.step.ms(decode_requests(decode)) + decode_cost(decode)
