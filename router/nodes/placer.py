"""Chooses a pair of nodes: candidates from the registry, their weights and breakers, then the policies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from random import Random

from common.errors import Overloaded, Unavailable
from common.messages.generation import ImageSpan
from common.messages.identity import ROLES, Role
from router.nodes.candidates import CandidateMaker
from router.nodes.health import NodeHealth, PairKey
from router.nodes.history import PlacementHistory
from router.nodes.local_prefill import LocalPrefill
from router.nodes.node_filter import NodeFilter
from router.nodes.placed_prompt import NO_PROMPT, PlacedPrompt
from router.nodes.placement import (
    Candidate,
    PlacementPolicy,
    PredictingPolicy,
    SamplingPolicy,
    choose_pair,
)
from router.nodes.placement_rules import PlacementRules
from router.nodes.prefix_index import PrefixMatches
from router.nodes.prompt_times import rest_ms
from router.nodes.registry import EligibleNodes, Node, NodeRegistry, Pair
from router.nodes.short_list import Accepts, ShortLists, any_node

NOTHING: frozenset[str] = frozenset()
MANY = 16  # nodes of a role that are all compared while some are to be avoided or take less
FEW = 2  # nodes that are compared without looking for better ones
POOL_RETRY = 1.0  # Retry-After while the pools of decode nodes are too full


@dataclass(frozen=True, slots=True)
class _Choices:
    """The candidates of one choice; both lists are non-empty."""

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    bad_pairs: Collection[PairKey]

    def without(self, avoid: Collection[str]) -> _Choices:
        """Drop these incarnations from each role that has other candidates."""
        return _Choices(_others(self.prefills, avoid), _others(self.decodes, avoid), self.bad_pairs)

    def among(self, prefer: Collection[str]) -> _Choices:
        """Keep only these incarnations in each role that has any of them."""
        return _Choices(_among(self.prefills, prefer), _among(self.decodes, prefer), self.bad_pairs)

    @property
    def has_good_pair(self) -> bool:
        return not self.bad_pairs or any(
            (p.incarnation, d.incarnation) not in self.bad_pairs for p in self.prefills for d in self.decodes
        )


class Placer:
    """Chooses pairs. The choices depend on the nodes, the history, the policies' turns, and the draws of `rng`."""

    def __init__(
        self,
        registry: NodeRegistry,
        policies: Mapping[Role, PlacementPolicy],
        health: NodeHealth,
        rng: Random,
        rules: PlacementRules,
    ) -> None:
        """`rng` draws the samples of policies that need only some of many nodes."""
        self._registry = registry
        self._policies = policies
        self._health = health
        self._samplers = {
            role: policy for role, policy in policies.items() if isinstance(policy, SamplingPolicy)
        }
        self._predicting = {
            role
            for role, policy in policies.items()
            if isinstance(policy, PredictingPolicy) and policy.predicts
        }
        self._rng = rng
        self._rules = rules
        self._never_busy = rules.busy_pool_share is None and rules.busy_first_token_ms is None
        self.history = PlacementHistory(self._rules, policies, health.clock)
        self._short_lists = ShortLists(registry, self.history)
        self._local = LocalPrefill(self.history, health, rules.local_tokens, rng)

    def prompt(
        self, token_ids: Sequence[int], salt: bytes, images: Sequence[ImageSpan], session: bytes
    ) -> PlacedPrompt:
        """Return the facts about a prompt that a choice needs; without a choice its blocks are not hashed."""
        eligible = self._registry.eligible_by_role()
        if eligible.only_pair is not None and not (self._local.enabled and eligible.local):
            return PlacedPrompt(len(token_ids), images=bool(images), session=session)
        return self.history.prompt(token_ids, salt, images, session)

    def choose(
        self,
        avoid: Collection[str] = NOTHING,
        prefer: Collection[str] = NOTHING,
        prompt: PlacedPrompt = NO_PROMPT,
    ) -> tuple[Node, Node] | Role:
        """Return (prefill, decode) for a prompt, or the role that has no node that could serve.

        Nodes with an open breaker are left out, then nodes of `avoid`, then bad pairs; each of these only while
        something else is left. Among the rest, nodes of `prefer` are taken whatever their load. Without any of them, a
        movable decode node may be chosen for both roles (local_prefill.py).
        """
        eligible = self._registry.eligible_by_role()
        local = eligible.local if self._local.enabled and not prefer else ()
        if eligible.only_pair is not None and not local:
            return eligible.only_pair
        maker = CandidateMaker(self.history, self._rules, prompt)
        pair = self._chosen(eligible, avoid, prefer, maker)
        if isinstance(pair, str) or not local:
            return pair
        return self._local.instead(Pair(*pair), local, avoid, prompt, maker)

    def _chosen(
        self,
        eligible: EligibleNodes,
        avoid: Collection[str],
        prefer: Collection[str],
        maker: CandidateMaker,
    ) -> tuple[Node, Node] | Role:
        """Return the pair that the policies choose among prefill nodes and decode nodes."""
        if eligible.only_pair is not None:
            return eligible.only_pair
        prefills, decodes = eligible.of["prefill"], eligible.of["decode"]
        if prefills and decodes and not (avoid or prefer) and self._health.uniform(eligible):
            prefill = self._sampled("prefill", prefills, maker, None)
            return prefill, self._sampled("decode", decodes, maker, prefill)
        if self._many(eligible):
            pair = self._chosen_from_samples(eligible, {*avoid, *self._health.nodes.blocked()}, prefer, maker)
            if pair is not None:
                return pair
        choices = self._choices(eligible, maker)
        if not isinstance(choices, _Choices):
            return choices
        narrowed = choices.without(avoid) if avoid else choices
        if not narrowed.has_good_pair:
            narrowed = choices
        if prefer and (preferred := narrowed.among(prefer)).has_good_pair:
            narrowed = preferred
        chosen = choose_pair(
            narrowed.prefills,
            narrowed.decodes,
            self._policies,
            narrowed.bad_pairs,
            lambda prefill, decodes: [maker.linked(prefill.incarnation, each) for each in decodes],
        )
        return self._registry.node(chosen[0].incarnation), self._registry.node(chosen[1].incarnation)

    def has_others(self, avoid: Collection[str]) -> bool:
        """Return whether a pair without any node of `avoid` can take a request."""
        maker = CandidateMaker(self.history, self._rules, NO_PROMPT)
        choices = self._choices(self._registry.eligible_by_role(), maker)
        if not isinstance(choices, _Choices):
            return False
        narrowed = choices.without(avoid)
        return narrowed.has_good_pair and not any(
            c.incarnation in avoid for c in (*narrowed.prefills, *narrowed.decodes)
        )

    def check_busy(self, prompt: PlacedPrompt) -> None:
        """Raise Overloaded if all nodes of a role that can be reached are busy (see PlacementRules)."""
        if self._never_busy:
            return
        for role, nodes in self._registry.eligible_by_role().of.items():
            # As a rule the first node or one of the next is not busy.
            waits = list(takewhile(bool, self._busy_seconds(role, nodes, prompt)))
            if waits and len(waits) == len(nodes):
                raise Overloaded(f"all {role} nodes are busy; try again later", retry_after=min(waits))

    def spared(
        self, pair: tuple[Node, Node], avoid: Collection[str], prompt: PlacedPrompt
    ) -> tuple[Node, Node]:
        """Return the pair, or one without busy nodes, as far as there are others."""
        if self._never_busy or not any(next(self._busy_seconds(node.role, [node], prompt)) for node in pair):
            return pair
        busy = {
            node.incarnation
            for role, nodes in self._registry.eligible_by_role().of.items()
            for node, seconds in zip(nodes, self._busy_seconds(role, nodes, prompt), strict=True)
            if seconds
        }
        found = self.choose({*avoid, *busy}, NOTHING, prompt)
        return pair if isinstance(found, str) else found

    def _busy_seconds(self, role: Role, nodes: Sequence[Node], prompt: PlacedPrompt) -> Iterator[float]:
        """Yield for each node of a role after how many seconds it may take a new request; 0 if it is not busy."""
        share, limit = self._rules.busy_pool_share, self._rules.busy_first_token_ms
        # Once for all nodes: it takes time in proportion to the prompt.
        matches = self.history.matches(role, prompt)
        for node in nodes:
            if role == "decode":
                yield 0.0 if share is None else _full_seconds(node, share)
            else:
                yield 0.0 if limit is None else self._late_seconds(node, limit, matches, prompt)

    def _late_seconds(
        self, node: Node, limit_ms: float, matches: PrefixMatches, prompt: PlacedPrompt
    ) -> float:
        """Return by how many seconds the first token of a prompt would be later than the limit, or 0."""
        if not node.rooms.tokens:
            # An idle node also computes a prompt that takes longer than the limit.
            return 0.0
        cached = self.history.cached_tokens(matches, node, prompt)
        beyond = node.rooms.ms + rest_ms(node.load.prompt_times, prompt.tokens, cached) - limit_ms
        return max(beyond, 0.0) / 1000

    def _sampled(
        self, role: Role, nodes: Sequence[Node], maker: CandidateMaker, prefill: Node | None
    ) -> Node:
        """Choose among nodes of full weight: a sample of them if the policy needs no more, so that cost stays flat.

        `prefill`: the node that was chosen for the prompt; None if that is still to be done.
        """
        if len(nodes) == 1:
            return nodes[0]
        if role in self._samplers and len(nodes) > FEW:
            return self._best(
                role, self._compared(role, self._sample(role, nodes), maker, prefill), maker, prefill
            )
        return self._best(role, nodes, maker, prefill)

    def _sample(self, role: Role, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return a sample of more than FEW nodes."""
        sample: Sequence[Node] = itemgetter(*self._samplers[role].sample(len(nodes), self._rng))(nodes)
        return sample

    def _best(self, role: Role, nodes: Sequence[Node], maker: CandidateMaker, prefill: Node | None) -> Node:
        """Return the node that the policy chooses among nodes that count alike."""
        if len(nodes) == 1:
            return nodes[0]
        candidates = maker.of(role, nodes, [1.0] * len(nodes), self.history.matches(role, maker.prompt))
        if prefill is not None:
            candidates = [maker.linked(prefill.incarnation, each) for each in candidates]
        return self._registry.node(self._policies[role].choose(candidates).incarnation)

    def _compared(
        self,
        role: Role,
        sample: Sequence[Node],
        maker: CandidateMaker,
        prefill: Node | None,
        accepts: Accepts = any_node,
    ) -> Sequence[Node]:
        """Return the nodes that the policy compares, out of a sample and of nodes that may hold the prompt."""
        prompt, matches = maker.prompt, self.history.matches(role, maker.prompt)
        if role in self._predicting and len(sample) > FEW:
            found: Sequence[Node]
            if prefill is None:
                found = self._short_lists.prefill(sample, matches, prompt, maker.session_nodes, accepts)
            else:
                found = self._short_lists.decode(
                    sample, matches, prompt, maker.session_nodes, prefill, accepts
                )
            if found is not sample:
                return found
        known = {node.incarnation: node for node in sample}
        known.update((node.incarnation, node) for node, _ in self._short_lists.holders(matches, accepts))
        known.update(
            (node.incarnation, node)
            for node in self._registry.eligible_among(role, maker.session_nodes)
            if accepts(node)
        )
        return [*known.values()]

    def _many(self, eligible: EligibleNodes) -> bool:
        """Return whether it would take too long to compare all nodes. Policies that draw no samples see them all."""
        return len(self._samplers) == len(ROLES) and any(len(nodes) > MANY for nodes in eligible.of.values())

    def _chosen_from_samples(
        self,
        eligible: EligibleNodes,
        refused: Collection[str],
        prefer: Collection[str],
        maker: CandidateMaker,
    ) -> tuple[Node, Node] | None:
        """Choose among samples while some nodes are refused, new, slow, or part of a bad pair.

        Returns None if the samples hold no pair that may get the request: then all nodes have to be compared.
        """
        self._health.judge(eligible.of, self._health.clock())
        node_filter = NodeFilter(self._health, eligible, refused, self._rng)
        prefill = self._chosen_from_sample("prefill", eligible, node_filter, prefer, maker, None)
        if prefill is None:
            return None
        bad = self._health.bad_pairs()
        if bad:
            worse = (decode for other, decode in bad if other == prefill.incarnation)
            node_filter = NodeFilter(self._health, eligible, {*refused, *worse}, self._rng)
        decode = self._chosen_from_sample("decode", eligible, node_filter, prefer, maker, prefill)
        return None if decode is None else (prefill, decode)

    def _chosen_from_sample(
        self,
        role: Role,
        eligible: EligibleNodes,
        node_filter: NodeFilter,
        prefer: Collection[str],
        maker: CandidateMaker,
        prefill: Node | None,
    ) -> Node | None:
        """Choose among nodes that pass the filter: preferred ones, or else a sample. None if none of these passes."""
        preferred = [
            node for node in self._registry.eligible_among(role, prefer) if not node_filter.refuses(node)
        ]
        if preferred:
            return self._best(role, preferred, maker, prefill)
        nodes = eligible.mixed[role]
        if not nodes:
            return None
        drawn, full = node_filter.split(self._sample(role, nodes) if len(nodes) > FEW else nodes)
        if drawn and not (role in self._predicting and len(full) >= FEW):
            return drawn[0]
        if not full:
            return None
        # Those that are drawn come first, because of nodes with equal costs the first one is taken.
        compared = self._compared(role, [*drawn, *full], maker, prefill, node_filter.accepts)
        return self._best(role, compared, maker, prefill)

    def _choices(self, eligible: EligibleNodes, maker: CandidateMaker) -> _Choices | Role:
        """Return all nodes as candidates, or the role that has none."""
        nodes = eligible.of
        for role in ROLES:
            if not nodes[role]:
                return role
        health = self._health
        health.judge(nodes, health.clock())
        prefills, decodes = (
            maker.of(
                role,
                nodes[role],
                health.weights(nodes[role], eligible.oldest[role]),
                self.history.matches(role, maker.prompt),
            )
            for role in ROLES
        )
        choices = _Choices(prefills, decodes, self._health.bad_pairs())
        broken = self._health.nodes.blocked()
        return choices.without(broken) if broken else choices


def _full_seconds(node: Node, share: float) -> float:
    """Return POOL_RETRY if requests use more than this share of the pool of a decode node, else 0."""
    load = node.load
    free = load.free_pages + load.cached_pages
    return POOL_RETRY if load.total_pages - free > share * load.total_pages else 0.0


def _others(candidates: Sequence[Candidate], avoid: Collection[str]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation not in avoid] or candidates


def _among(candidates: Sequence[Candidate], prefer: Collection[str]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation in prefer] or candidates


def unavailable(role: Role) -> Unavailable:
    """Return the refusal when no node of `role` can be chosen."""
    return Unavailable(f"no {role} node can take requests now; try again in a few seconds")
