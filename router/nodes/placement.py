"""Placement policies: pure functions over the state of the registry, one class per policy."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from common.messages.identity import NodeLoad, Role
from common.named import named
from common.placements import PLACEMENTS

_NAME = attrgetter("name")
LEAST_WEIGHT = 0.05  # relative to the heaviest candidate, so that no node starves


class Candidate(msgspec.Struct, frozen=True):
    """One node that can take a request now. It is a struct because each request creates many."""

    name: str
    incarnation: str
    load: NodeLoad  # from its last heartbeat
    assigned: int  # unfinished requests placed there; those of this router are newer than any heartbeat
    # Prefill nodes: predicted milliseconds until the prompt to be placed would be computed there, after all that are
    # assigned.
    ready_ms: float
    weight: float = 1.0  # share of requests relative to the other candidates; all may be below 1


class PlacementPolicy(Protocol):
    """Chooses one of `candidates`, which is never empty."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...


@runtime_checkable
class SamplingPolicy(PlacementPolicy, Protocol):
    """A policy that chooses as well among some of many nodes of full weight."""

    most_candidates: int


class Shares:
    """Lets nodes of reduced weight take part in as many choices as their weight allows.

    Each choice credits such a node with weight / sum of weights; a node whose credit reaches 1 may be chosen.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}  # name -> credit of a node with reduced weight

    def split(self, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], list[Candidate]]:
        """Return (candidates of full weight, candidates of reduced weight that may be chosen now)."""
        weights = [c.weight for c in candidates]
        most = max(weights)
        if min(weights) == most:
            self._credit.clear()
            return candidates, []
        total = sum(weights)
        reduced = [c for c in candidates if c.weight < most]
        self._credit = {
            c.name: min(self._credit.get(c.name, 0.0) + max(c.weight, LEAST_WEIGHT * most) / total, 2.0)
            for c in reduced
        }
        due = [c for c in reduced if self._credit[c.name] > 1.0 - 1e-9]
        return [c for c in candidates if c.weight == most], due

    def take(self, chosen: Candidate) -> None:
        if chosen.name in self._credit:
            self._credit[chosen.name] -= 1.0


class RoundRobin:
    """Chooses nodes in turn by name, whatever their load. A node of reduced weight gets fewer turns."""

    def __init__(self) -> None:
        self._last = ""
        self._shares = Shares()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        full, due = self._shares.split(candidates)
        if due:
            self._shares.take(due[0])
            return due[0]
        later = [c for c in full if c.name > self._last]
        chosen = min(later or full, key=_NAME)
        self._last = chosen.name
        return chosen


class DrawnTurns:
    """Draws one of several equals at random, and none again before the others have had their turn.

    A fixed order of turns could resonate with a pattern of the traffic: of two nodes one would get all long prompts.
    The draws are seeded, so that the same calls give the same choices.
    """

    def __init__(self) -> None:
        self._rng = Random(0)
        self._taken: set[str] = set()  # names that have had their turn

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        waiting = [c for c in candidates if c.name not in self._taken]
        if not waiting:
            self._taken.clear()
            waiting = [*candidates]
        chosen = self._rng.choice(waiting)
        self._taken.add(chosen.name)
        return chosen


class LeastLoaded:
    """Chooses the least `cost` per weight; among equals the node with the fewest requests, then by `DrawnTurns`.

    The least loaded of some nodes is hardly more loaded than that of all, so many nodes are sampled.
    """

    most_candidates = 16

    def __init__(self, cost: Callable[[Candidate], float]) -> None:
        self._cost = cost
        self._ties = DrawnTurns()
        self._shares = Shares()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        full, due = self._shares.split(candidates)
        if not due:
            chosen = self._of_equal_weight(full)
            self._shares.take(chosen)
            return chosen
        ranked = [((self._cost(c) / max(c.weight, LEAST_WEIGHT), c.assigned), c) for c in (*full, *due)]
        least = min(rank for rank, _ in ranked)
        best = [c for rank, c in ranked if rank == least]
        # Among equals a node of reduced weight comes first, because it may be chosen rarely.
        chosen = next((c for c in due if c in best), None) or self._ties.choose(best)
        self._shares.take(chosen)
        return chosen

    def _of_equal_weight(self, candidates: Sequence[Candidate]) -> Candidate:
        costs = list(map(self._cost, candidates))
        least = min(costs)
        if costs.count(least) == 1:
            return candidates[costs.index(least)]
        equal = [c for c, cost in zip(candidates, costs) if cost == least]
        fewest = min(c.assigned for c in equal)
        return self._ties.choose([c for c in equal if c.assigned == fewest])


def choose_pair(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    policies: Mapping[Role, PlacementPolicy],
    bad_pairs: Container[tuple[str, str]] = frozenset(),
) -> tuple[Candidate, Candidate]:
    """Choose a prefill and a decode node from non-empty lists. A pair in `bad_pairs` is chosen only if all are bad."""
    if not bad_pairs:
        return policies["prefill"].choose(prefills), policies["decode"].choose(decodes)

    def linked(p: Candidate) -> list[Candidate]:
        return [d for d in decodes if (p.incarnation, d.incarnation) not in bad_pairs]

    prefill = policies["prefill"].choose([p for p in prefills if linked(p)] or prefills)
    return prefill, policies["decode"].choose(linked(prefill) or decodes)


def prefill_cost(candidate: Candidate) -> float:
    """Return the predicted time to the first token of the request that is to be placed."""
    return candidate.ready_ms


def decode_cost(candidate: Candidate) -> float:
    """Return the requests per step plus the fill level of the pool: inter-token latency and retractions follow them."""
    load = candidate.load
    used = 1.0 - (load.free_pages + load.cached_pages) / load.total_pages if load.total_pages else 0.0
    return max(candidate.assigned, load.running + load.transferring + load.queued) + 8.0 * max(
        used - 0.8, 0.0
    )


def round_robin(cost: Callable[[Candidate], float]) -> RoundRobin:
    """Return a policy that ignores the cost."""
    return RoundRobin()


def make_policy(name: str, cost: Callable[[Candidate], float]) -> PlacementPolicy:
    """Make the policy that a row of the table names, for nodes of one role with this cost."""
    policy: PlacementPolicy = named(PLACEMENTS[name])(cost)
    return policy
