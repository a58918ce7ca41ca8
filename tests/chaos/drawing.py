"""Draws the next fault from a seed, so that every kind and every station gets its share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import (
    BOTH,
    DAMAGE,
    DAMAGE_WAIT,
    DISK,
    DISK_PART,
    KINDS,
    LINKS,
    MINIMUM,
    MOMENTARY,
    PROCESSES,
    WEIGHTS,
    Fault,
    Kind,
    minimums,
)
from tests.chaos.stations import STATIONS, Station

TRIES = 20  # drawn targets before giving up for now
RESERVE = 1.1  # times the minimum
ROUTER_SHARE = 0.12  # share of process faults
AIMED_SHARE = 0.6  # share of faults that wait for a request at a drawn station
AIMED_SHARE_OF_PROCESSES = 0.85
HIT = 2  # weight of a hit station relative to a missed one, so that rare stations are aimed at more often
LONG_SHARE = 0.25  # share of faults that last for seconds


@dataclass
class Drawer:
    """Draws `faults` in total, of `kinds`. With `links`, only links whose names end with one of them are disturbed."""

    cluster: ChaosCluster
    rng: random.Random
    faults: int
    kinds: Sequence[Kind] = KINDS
    links: str = ""
    drawn: Counter[Kind] = field(default_factory=Counter)
    # Faults that found a request at their station in time.
    _aimed: Counter[tuple[Kind, Station]] = field(default_factory=Counter)
    _total: int = 0

    def draw(self, reserved: set[str]) -> Fault | None:
        """Return the next fault; None if no drawn fault is allowed now. `reserved`: targets of waiting faults."""
        possible = [kind for kind in self.kinds if self._possible(kind)]
        possible = self._owed(possible) or possible
        weights = [WEIGHTS[kind] for kind in possible]
        for kind in (*self._behind(possible), *self.rng.choices(possible, weights, k=TRIES)):
            for _ in range(TRIES if kind in PROCESSES else 1):
                fault = self._of(kind)
                if fault is not None and self._allowed(fault, reserved):
                    self._total += 1
                    self.drawn[kind] += 1
                    return replace(fault, station=self._station(kind))
        return None

    def hit(self, fault: Fault) -> None:
        """Record that a request was at the fault's station when it began."""
        if fault.station is not None:
            self._aimed[fault.kind, fault.station] += HIT

    def _possible(self, kind: Kind) -> bool:
        if kind in LINKS:
            return bool(self.cluster.links)
        return kind != DISK or self.cluster.disk.can_be_filled

    def _owed(self, possible: Sequence[Kind]) -> list[Kind]:
        """Return the kinds that need all remaining faults; others must wait until these are allowed."""
        least: dict[str, int] = {**dict.fromkeys(possible, 1), **minimums(self.faults)}
        owed = {kind: least[kind] - self.drawn[kind] for kind in possible if least[kind] > self.drawn[kind]}
        return list(owed) if sum(owed.values()) >= self.faults - self._total else []

    def _behind(self, possible: Sequence[Kind]) -> list[Kind]:
        """Return the kinds that have had less than their share so far, the most delayed first."""
        shares = {kind: WEIGHTS[kind] / sum(WEIGHTS[each] for each in possible) for kind in possible}
        lacking = {
            kind: max(RESERVE * MINIMUM.get(kind, 0.0), share / 2, 2 / self.faults) * (self._total + 1)
            - self.drawn[kind]
            for kind, share in shares.items()
        }
        return sorted((kind for kind in possible if lacking[kind] >= 1), key=lambda kind: -lacking[kind])

    def _of(self, kind: Kind) -> Fault | None:
        if kind == DISK:
            return Fault(self._total, kind, DISK_PART, round(self.rng.uniform(1.0, 6.0), 2))
        return self._of_process(kind) if kind in PROCESSES else self._of_link(kind)

    def _of_process(self, kind: Kind) -> Fault:
        nodes = [name for name in self.cluster.names if name != "router"]
        if kind == "restart":
            return Fault(self._total, kind, self.rng.choice([name for name in nodes if "prefill" in name]))
        share = 0.0 if kind == "drain" else ROUTER_SHARE
        target = "router" if self.rng.random() < share else self.rng.choice(nodes)
        long = self.rng.random() < LONG_SHARE
        seconds = self.rng.uniform(4.0, 6.0) if long else self.rng.uniform(0.2, 2.0)
        if kind in ("kill", "drain"):
            seconds = self.rng.uniform(0.0, 0.6)  # until it is restarted
        return Fault(self._total, kind, target, round(seconds, 2))

    def _of_link(self, kind: Kind) -> Fault | None:
        links = [name for name in self.cluster.links if name.endswith(self.links)]
        if not links:
            return None
        target = self.rng.choice(links)
        directions = self.rng.choice((BOTH, ("up",), ("down",)))
        long = kind in ("withhold", "swallow", "half-open") and self.rng.random() < LONG_SHARE
        seconds = self.rng.uniform(4.0, 8.0) if long else self.rng.uniform(0.1, 2.0)
        amount = {"delay": self.rng.uniform(0.02, 0.3), "rate": self.rng.uniform(2e4, 1e6)}.get(kind, 0.0)
        if kind in DAMAGE:
            amount, seconds = self.rng.randrange(1, 4), DAMAGE_WAIT
        return Fault(self._total, kind, target, round(seconds, 2), directions, amount)

    def _station(self, kind: Kind) -> Station | None:
        if kind in (DISK, "restart"):
            return None
        of_process = kind in PROCESSES
        if self.rng.random() >= (AIMED_SHARE_OF_PROCESSES if of_process else AIMED_SHARE):
            return None
        fewest = min(self._aimed[kind, station] for station in STATIONS)
        behind = [station for station in STATIONS if self._aimed[kind, station] == fewest]
        station = self.rng.choice(behind if of_process else STATIONS)
        self._aimed[kind, station] += 1
        return station

    def _allowed(self, fault: Fault, reserved: set[str]) -> bool:
        """Return whether the fault affects no part twice and leaves a healthy pair, if there is more than one."""
        impaired = self.cluster.timeline.impaired | reserved
        if fault.target in impaired or any(part in impaired for part in self._ends(fault.target)):
            return False
        if fault.kind in MOMENTARY or fault.kind == DISK or len(self.cluster.pairs) == 1:
            return True
        if fault.target == "router":
            return not impaired - {DISK_PART}
        after = impaired | {fault.target}
        return any(after.isdisjoint(self.cluster.parts_of_pair(*pair)) for pair in self.cluster.pairs)

    def _ends(self, target: str) -> list[str]:
        """Return the live processes at the ends of a link; with a dead one there is nothing to disturb."""
        return [name for name in self.cluster.names if name in target and target in self.cluster.links]
