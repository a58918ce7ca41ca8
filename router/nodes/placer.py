"""Chooses a pair of nodes: candidates from the registry, their weights and breakers, then the policies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from common.errors import Unavailable
from common.messages.identity import Role
from router.nodes.health import NodeHealth, PairKey
from router.nodes.placement import Candidate, PlacementPolicy, SamplingPolicy, choose_pair
from router.nodes.registry import ROLES, Node, NodeRegistry

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Field:
    """The candidates of one choice; both lists are non-empty."""

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    bad_pairs: Collection[PairKey]

    def without(self, avoid: Collection[str]) -> _Field:
        """Drop these incarnations from each role that has other candidates."""
        return _Field(_others(self.prefills, avoid), _others(self.decodes, avoid), self.bad_pairs)

    def among(self, prefer: Collection[str]) -> _Field:
        """Keep only these incarnations in each role that has any of them."""
        return _Field(_among(self.prefills, prefer), _among(self.decodes, prefer), self.bad_pairs)

    @property
    def has_good_pair(self) -> bool:
        return not self.bad_pairs or any(
            (p.incarnation, d.incarnation) not in self.bad_pairs for p in self.prefills for d in self.decodes
        )


class Placer:
    """Chooses pairs. The choices depend on the nodes, the turns of the policies, and the draws of `rng`."""

    def __init__(
        self,
        registry: NodeRegistry,
        policies: Mapping[Role, PlacementPolicy],
        health: NodeHealth,
        rng: Random,
    ) -> None:
        """`rng` draws the samples of policies that need only some of many nodes."""
        self._registry = registry
        self._policies = policies
        self._health = health
        self._most = {
            role: policy.most_candidates
            for role, policy in policies.items()
            if isinstance(policy, SamplingPolicy)
        }
        self._rng = rng

    def choose(
        self, avoid: Collection[str] = NOTHING, prefer: Collection[str] = NOTHING, tokens: int = 0
    ) -> tuple[Node, Node] | Role:
        """Return (prefill, decode) for a prompt of `tokens`, or the role that has no node that could serve.

        Nodes with an open breaker are left out, then nodes of `avoid`, then bad pairs; each of these only while
        something else is left. Among the rest, nodes of `prefer` are taken whatever their load.
        """
        eligible = self._registry.eligible_by_role()
        prefills, decodes = eligible.of["prefill"], eligible.of["decode"]
        if len(prefills) == 1 and len(decodes) == 1:
            return prefills[0], decodes[0]
        if prefills and decodes and not (avoid or prefer) and self._health.uniform(eligible):
            return self._sampled("prefill", prefills, tokens), self._sampled("decode", decodes, tokens)
        field = self._field(eligible.of, tokens)
        if not isinstance(field, _Field):
            return field
        narrowed = field.without(avoid) if avoid else field
        if not narrowed.has_good_pair:
            narrowed = field
        if prefer and (preferred := narrowed.among(prefer)).has_good_pair:
            narrowed = preferred
        prefill, decode = choose_pair(narrowed.prefills, narrowed.decodes, self._policies, narrowed.bad_pairs)
        return self._registry.node(prefill.incarnation), self._registry.node(decode.incarnation)

    def has_others(self, avoid: Collection[str]) -> bool:
        """Return whether a pair without any node of `avoid` can take a request."""
        field = self._field(self._registry.eligible_by_role().of)
        if not isinstance(field, _Field):
            return False
        narrowed = field.without(avoid)
        return narrowed.has_good_pair and not any(
            c.incarnation in avoid for c in (*narrowed.prefills, *narrowed.decodes)
        )

    def _sampled(self, role: Role, nodes: Sequence[Node], tokens: int) -> Node:
        """Choose among nodes of full weight: a sample of them if the policy needs no more, so that cost stays flat.

        A sample consists of neighbors by name, from a random node on; after the last name it continues with the first.
        Policies may take equals in turn by name, for which such samples give idle nodes equal shares.
        The start is random because a fixed order of samples can resonate with a pattern of the traffic.
        """
        most = self._most.get(role, len(nodes))
        if len(nodes) > most:
            start = self._rng.randrange(len(nodes))
            beyond = max(start + most - len(nodes), 0)
            nodes = [*nodes[start : start + most], *nodes[:beyond]]
        chosen = self._policies[role].choose([node.candidate(1.0, tokens) for node in nodes])
        return self._registry.node(chosen.incarnation)

    def _field(self, nodes: Mapping[Role, Sequence[Node]], tokens: int = 0) -> _Field | Role:
        prefills, decodes = (self._candidates(nodes[role], tokens) for role in ROLES)
        if not prefills:
            return "prefill"
        if not decodes:
            return "decode"
        field = _Field(prefills, decodes, self._health.bad_pairs())
        broken = self._health.nodes.blocked()
        return field.without(broken) if broken else field

    def _candidates(self, nodes: Sequence[Node], tokens: int) -> list[Candidate]:
        weights = self._health.weights(nodes)
        return [node.candidate(weight, tokens) for node, weight in zip(nodes, weights, strict=True)]


def _others(candidates: Sequence[Candidate], avoid: Collection[str]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation not in avoid] or candidates


def _among(candidates: Sequence[Candidate], prefer: Collection[str]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation in prefer] or candidates


def unavailable(role: Role) -> Unavailable:
    """Return the refusal when no node of `role` can be chosen."""
    return Unavailable(f"no {role} node can take requests now; try again in a few seconds")
