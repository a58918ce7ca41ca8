"""Which node takes a request: pure functions over what the registry knows, one class per policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.identity import NodeLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node that can take a request now."""

    name: str
    incarnation: str
    load: NodeLoad  # as of its last heartbeat
    assigned: int  # requests placed there and not finished: newer than any heartbeat
    assigned_tokens: int  # their prompt tokens that are not computed yet


class PlacementPolicy(Protocol):
    """`candidates` is never empty; the answer is one of them."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...


class RoundRobin:
    """Each in turn, by name, whatever their load."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        ordered = sorted(candidates, key=lambda c: c.name)
        chosen = next((c for c in ordered if c.name > self._last), ordered[0])
        self._last = chosen.name
        return chosen


class LeastLoaded:
    """The node with the least `cost`; among equals the one with the fewest requests, then each in turn."""

    def __init__(self, cost: Callable[[Candidate], float]) -> None:
        self._cost = cost
        self._ties = RoundRobin()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        ranked = [((self._cost(c), c.assigned), c) for c in candidates]
        least = min(rank for rank, _ in ranked)
        return self._ties.choose([c for rank, c in ranked if rank == least])


def prefill_cost(candidate: Candidate) -> float:
    """Prompt tokens in front of a new request: what its time to first token depends on."""
    return candidate.assigned_tokens


def decode_cost(candidate: Candidate) -> float:
    """Requests per step, and how full the pool is: what inter-token latency and retraction depend on."""
    load = candidate.load
    used = 1.0 - (load.free_pages + load.cached_pages) / load.total_pages if load.total_pages else 0.0
    return max(candidate.assigned, load.running + load.transferring + load.queued) + 8.0 * max(
        used - 0.8, 0.0
    )


POLICIES: dict[str, Callable[[Callable[[Candidate], float]], PlacementPolicy]] = {
    "round_robin": lambda cost: RoundRobin(),
    "least_loaded": LeastLoaded,
}
