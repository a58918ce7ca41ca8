"""The faults of processes, links and the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tests.chaos.proxy import Conditions, Direction
from tests.chaos.stations import Station

Kind = Literal[
    "kill",
    "restart",
    "stop",
    "drain",
    "disk-full",
    "reset",
    "refuse",
    "withhold",
    "swallow",
    "half-open",
    "flip",
    "cut",
    "repeat",
    "delay",
    "rate",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DAMAGE: tuple[Kind, ...] = ("flip", "cut", "repeat")
MOMENTARY: tuple[Kind, ...] = ("reset", *DAMAGE)  # the link works again immediately
PROCESSES: tuple[Kind, ...] = ("kill", "restart", "stop", "drain")
DISK: Kind = "disk-full"
DISK_PART = "disk"  # its name in the timeline; no request needs it
LINKS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in PROCESSES and kind != DISK)
WEIGHTS: dict[Kind, float] = {
    "kill": 8,
    "restart": 1,
    "stop": 8,
    "drain": 1,
    "disk-full": 1,
    "reset": 18,
    "refuse": 6,
    "withhold": 12,
    "swallow": 8,
    "half-open": 6,
    "flip": 10,
    "cut": 9,
    "repeat": 5,
    "delay": 6,
    "rate": 5,
}
# Minimum shares of all faults of a run. Random drawing would not reach them: while a node is away, most kills and stops
# would take the last healthy pair and are not allowed.
MINIMUM: dict[str, float] = {"kill": 0.06, "stop": 0.06, "link": 0.1}
BOTH: tuple[Direction, ...] = ("up", "down")
DAMAGE_WAIT = 2.0  # seconds in which the link must carry the bytes that are to be damaged
BURST_SECONDS = 12.0  # short requests after a restart, one per BURST_INTERVAL
BURST_INTERVAL = 0.1


@dataclass(frozen=True)
class Fault:
    """A fault. `target` is a process, a link or the disk; it lasts `seconds`."""

    number: int
    kind: Kind
    target: str
    seconds: float = 0.0
    directions: tuple[Direction, ...] = BOTH
    amount: float = 0.0  # chunks to damage, seconds of delay, or bytes per second
    station: Station | None = None  # where a request at the target is when it begins

    @property
    def name(self) -> str:
        return f"{self.number}"


def group(kind: str) -> str:
    """The group of `MINIMUM` that this kind belongs to."""
    return "link" if kind in LINKS else kind


def minimums(faults: int) -> dict[str, int]:
    return {name: int(share * faults) for name, share in MINIMUM.items()}


def apply(fault: Fault, conditions: Conditions) -> None:
    """Change what happens to the bytes in one direction of a link."""
    if fault.kind == "delay":
        conditions.delay = fault.amount
    elif fault.kind == "rate":
        conditions.rate = fault.amount
    elif fault.kind == "withhold":
        conditions.withheld = True
    elif fault.kind in ("swallow", "half-open"):
        conditions.swallowed = True
    elif fault.kind == "flip":
        conditions.flips = int(fault.amount)
    elif fault.kind == "cut":
        conditions.cuts = int(fault.amount)
    elif fault.kind == "repeat":
        conditions.repeats = int(fault.amount)
