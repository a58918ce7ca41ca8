"""Placement policies: pure functions over the state of the registry, one class per policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from random import Random
from typing import Literal, Protocol, runtime_checkable

import msgspec

from common.messages.identity import NodeLoad, Role
from common.named import named
from common.placements import PLACEMENTS
from router.nodes.measured_steps import UNMEASURED, StepTime

_NAME = attrgetter("name")
MIN_WEIGHT = 0.05  # relative to the heaviest candidate, so that no node starves
MAX_REDUCED = 4096  # nodes of reduced weight that a policy remembers
ANSWER_TOKENS = 256  # length of the answer whose predicted time is the cost of a decode node
KEPT_FREE = 0.2  # share of a pool that running requests will still need


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
    # Milliseconds by which a first token may come later if the request stays with its session; 0 on other nodes.
    session_ms: float = 0.0
    # Decode nodes:
    moved: int = 0  # tokens of the prompt that the node is not believed to hold
    page_size: int = 16
    transfer_ms: float = 0.0  # predicted, from the prefill node that was chosen
    step: StepTime = UNMEASURED
    accept: float = 1.0  # tokens of one request per step


class PlacementPolicy(Protocol):
    """Chooses one of `candidates`, which is never empty."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...


@runtime_checkable
class SamplingPolicy(PlacementPolicy, Protocol):
    """A policy that chooses equally well among a sample of many nodes of full weight."""

    def sample(self, count: int, rng: Random) -> Sequence[int]:
        """Return the indices of the nodes to be compared among `count`; all of them if they are few."""
        ...


@runtime_checkable
class PredictingPolicy(SamplingPolicy, Protocol):
    """A policy that chooses only by the predicted cost of its role."""

    predicts: bool


@runtime_checkable
class PrefixPolicy(PlacementPolicy, Protocol):
    """A policy whose costs take into account which part of the prompt a candidate holds."""

    reads_prefixes: Literal[True]


@runtime_checkable
class EventPolicy(PrefixPolicy, Protocol):
    """A policy that relies on the caches that nodes themselves report."""

    reads_events: Literal[True]


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
            if self._credit:
                self._forget(candidates)
            return candidates, []
        total = sum(weights)
        reduced, full = list[Candidate](), list[Candidate]()
        for each in candidates:
            (reduced if each.weight < most else full).append(each)
        self._forget(full)
        credit = self._credit
        for each in reduced:
            share = max(each.weight, MIN_WEIGHT * most) / total
            credit[each.name] = min(credit.get(each.name, 0.0) + share, 2.0)
        due = [c for c in reduced if credit[c.name] > 1.0 - 1e-9]
        return full, due

    def _forget(self, full: Sequence[Candidate]) -> None:
        """Forget nodes that have their full weight, and all if those that are gone may be too many."""
        for each in full:
            self._credit.pop(each.name, None)
        if len(self._credit) > MAX_REDUCED:
            self._credit.clear()

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
    """Draws one of several equal nodes at random, and none again before the others have had their turn.

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
    """Chooses the lowest `cost` per weight; of equal ones the node with the fewest requests, then by `DrawnTurns`.

    The least loaded node of a sample is hardly more loaded than that of all, so large roles are sampled.
    """

    most_candidates = 16

    def __init__(self, cost: Callable[[Candidate], float]) -> None:
        self._cost = cost
        self.predicts = cost in (prefill_cost, decode_cost)
        self._starts: list[int] = []  # of samples among `_of` nodes, left for this round
        self._of = 0
        self._ties = DrawnTurns()
        self._shares = Shares()

    def sample(self, count: int, rng: Random) -> Sequence[int]:
        """Return neighbors by name, from a random node on; after the last name they continue with the first.

        Each node is a start once before any is again: of equals the first one is taken, so idle nodes get equal shares.
        The order is drawn because a fixed one can resonate with a pattern of the traffic.
        """
        if not self._starts or self._of != count:
            self._starts, self._of = [*range(count)], count
        drawn = int(rng.random() * len(self._starts))
        start, self._starts[drawn] = self._starts[drawn], self._starts[-1]
        self._starts.pop()
        end = start + min(count, self.most_candidates)
        return range(start, end) if end <= count else [*range(start, count), *range(end - count)]

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        full, due = self._shares.split(candidates)
        if not due:
            chosen = self._of_equal_weight(full)
            self._shares.take(chosen)
            return chosen
        ranked = [((_per_weight(self._cost(c), c.weight), c.assigned), c) for c in (*full, *due)]
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


def _per_weight(cost: float, weight: float) -> float:
    """Return a cost that is higher for a lower weight. With a session or a temperature costs may be negative."""
    share = max(weight, MIN_WEIGHT)
    return cost / share if cost > 0 else cost * share


class PowerOfTwo(LeastLoaded):
    """Compares two nodes that are drawn at random.

    Requests that are placed at the same time, by this router or others, then go to different nodes: with all nodes
    compared they would all go to the one that was the least loaded a moment ago.
    """

    most_candidates = 2

    def sample(self, count: int, rng: Random) -> Sequence[int]:
        """Return two indices."""
        return rng.sample(range(count), min(count, self.most_candidates))


class CacheAware(LeastLoaded):
    """Chooses the lowest cost; tokens that a node is believed to hold cost nothing.

    The sample has the nodes that hold the longest parts of the prompt in addition (see `Placer`).
    """

    reads_prefixes: Literal[True] = True


class CacheEvents(CacheAware):
    """Chooses like `CacheAware`, by the blocks that nodes report to hold (KV events)."""

    reads_events: Literal[True] = True


def choose_pair(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    policies: Mapping[Role, PlacementPolicy],
    bad_pairs: Container[tuple[str, str]],
    link: Callable[[Candidate, Sequence[Candidate]], Sequence[Candidate]],
) -> tuple[Candidate, Candidate]:
    """Choose a prefill and a decode node from non-empty lists. A pair in `bad_pairs` is chosen only if all are bad.

    `link` returns the decode nodes with the costs that depend on the prefill node.
    """
    if not bad_pairs:
        prefill = policies["prefill"].choose(prefills)
        return prefill, policies["decode"].choose(link(prefill, decodes))

    def linked(p: Candidate) -> list[Candidate]:
        return [d for d in decodes if (p.incarnation, d.incarnation) not in bad_pairs]

    prefill = policies["prefill"].choose([p for p in prefills if linked(p)] or prefills)
    return prefill, policies["decode"].choose(link(prefill, linked(prefill) or decodes))


def prefill_cost(candidate: Candidate) -> float:
    """Return the predicted milliseconds to the first token of the request that is to be placed."""
    return candidate.ready_ms - candidate.session_ms


def decode_cost(candidate: Candidate) -> float:
    """Return the predicted milliseconds that an answer of ANSWER_TOKENS tokens takes longer than on an idle node.

    They are the sum of the transfer, the wait for pages, and what the other requests add to the steps. If less than
    KEPT_FREE of a pool is free, requests count as waiting for pages, because running ones will need what is left.
    """
    load, requests = candidate.load, decode_requests(candidate)
    steps = ANSWER_TOKENS / max(candidate.accept, 1.0)
    missing = missing_pages(load, candidate.moved / candidate.page_size)
    wait_ms = 0.0
    if missing > 0:
        # The used pages become free in the time of about one answer.
        used = load.total_pages - load.free_pages - load.cached_pages
        wait_ms = steps * candidate.step.ms(requests) * missing / used
    added_ms = steps * candidate.step.each * requests
    return candidate.transfer_ms + wait_ms + added_ms - candidate.session_ms


def missing_pages(load: NodeLoad, pages: float) -> float:
    """Return how many used pages of a decode node must become free before `pages` fit; 0 or less: none."""
    spare = load.free_pages + load.cached_pages
    missing = pages + KEPT_FREE * load.total_pages - spare
    return missing if load.total_pages > spare else 0.0


def decode_requests(candidate: Candidate) -> int:
    """Return the number of requests of a decode node, those included that it has not reported yet."""
    load = candidate.load
    return max(candidate.assigned, load.running + load.transferring + load.queued)


def round_robin(cost: Callable[[Candidate], float]) -> RoundRobin:
    """Return a policy that ignores the cost."""
    return RoundRobin()


def softened(
    cost: Callable[[Candidate], float], temperature_ms: float, rng: Random
) -> Callable[[Candidate], float]:
    """Return a cost whose least value is drawn from the softmax of -cost / temperature (the Gumbel trick).

    A node whose cost is `temperature_ms` higher is then chosen e times less often. At 0 nothing is drawn.
    """
    if temperature_ms <= 0:
        return cost

    def drawn(candidate: Candidate) -> float:
        return cost(candidate) + temperature_ms * math.log(max(-math.log(1.0 - rng.random()), 1e-300))

    return drawn


def make_policy(name: str, cost: Callable[[Candidate], float]) -> PlacementPolicy:
    """Make the policy that a row of the table names, for nodes of one role with this cost."""
    policy: PlacementPolicy = named(PLACEMENTS[name])(cost)
    return policy
