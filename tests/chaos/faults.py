"""What can happen to processes and links, and a plan of it from a seed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.chaos.cluster import ChaosCluster, link_name
from tests.chaos.event_tail import EventTail
from tests.chaos.proxy import Conditions, Direction, Link
from tests.chaos.stations import STATIONS, Station

Kind = Literal[
    "kill",
    "stop",
    "drain",
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
DAMAGE: tuple[Kind, ...] = ("flip", "cut", "repeat")
MOMENTARY: tuple[Kind, ...] = ("reset", *DAMAGE)  # these leave the link in order
WEIGHTS: dict[Kind, int] = {
    "kill": 8,
    "stop": 9,
    "drain": 2,
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
REPORT_EVERY = 100  # faults
PROCESSES: tuple[Kind, ...] = ("kill", "stop", "drain")
BOTH: tuple[Direction, ...] = ("up", "down")
DAMAGE_WAIT = 2.0  # seconds in which the link has to carry the bytes that are to be damaged
ROUTER_SHARE = 0.15  # of process faults
AIMED_SHARE = 0.6  # of faults that wait for a request at a drawn station
AIM_SECONDS = 1.5  # that such a fault waits at most
DRAIN_SECONDS = 60.0  # that a node may take to end after SIGTERM: health.drain_timeout, and a busy machine
START_SECONDS = 90.0  # until a process that was started again is listed, on a busy machine
ABSENT_SECONDS = 20.0  # until one that was only disturbed is listed again


@dataclass(frozen=True)
class Fault:
    """`target` is a process or a link; `seconds` how long it lasts."""

    number: int
    kind: Kind
    target: str
    seconds: float = 0.0
    directions: tuple[Direction, ...] = BOTH
    amount: float = 0.0  # chunks to damage, seconds of delay, bytes per second
    station: Station | None = None  # of some request at the target when it begins

    @property
    def name(self) -> str:
        return f"{self.number}"


@dataclass
class Injector:
    """Draws faults and carries them out; several at a time, on different parts."""

    cluster: ChaosCluster
    rng: random.Random
    tail: EventTail
    process_weight: float = 1.0
    done: list[Fault] = field(default_factory=list)
    detections: list[tuple[str, str, float]] = field(default_factory=list)  # kind, role, seconds
    restarts: list[float] = field(default_factory=list)
    _reserved: set[str] = field(default_factory=set)  # targets of faults that wait for their moment
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _number: int = 0

    async def run(self, faults: int, seconds: float) -> None:
        """`faults` in all, evenly over `seconds`; later ones come sooner where earlier ones were held up."""
        begun = time.monotonic()
        for index in range(faults):
            due = begun + seconds * index / faults
            if index % REPORT_EVERY == 0:
                print(f"{index} faults after {time.monotonic() - begun:.0f} s", flush=True)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while (fault := self._draw()) is None:
                await asyncio.sleep(0.05)
            task = asyncio.create_task(self._carry_out(fault))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await self.settle()

    async def settle(self) -> None:
        """Until every fault is over and whoever was killed is back."""
        while self._running:
            await asyncio.gather(*list(self._running))

    # ---- drawing

    def _draw(self) -> Fault | None:
        """None where everything that was drawn would take the last healthy pair, or hit a part twice."""
        for _ in range(20):
            kinds = list(WEIGHTS)
            weights = [WEIGHTS[kind] * (self.process_weight if kind in PROCESSES else 1.0) for kind in kinds]
            kind = self.rng.choices(kinds, weights)[0]
            fault = self._of_process(kind) if kind in PROCESSES else self._of_link(kind)
            if fault is not None and self._allowed(fault):
                self._number += 1
                aimed = self.rng.random() < AIMED_SHARE
                return replace(fault, station=self.rng.choice(STATIONS)) if aimed else fault
        return None

    def _of_process(self, kind: Kind) -> Fault:
        nodes = [name for name in self.cluster.names if name != "router"]
        share = 0.0 if kind == "drain" else ROUTER_SHARE
        target = "router" if self.rng.random() < share else self.rng.choice(nodes)
        long = self.rng.random() < 0.4
        seconds = self.rng.uniform(4.0, 6.0) if long else self.rng.uniform(0.2, 2.0)
        if kind in ("kill", "drain"):
            seconds = self.rng.uniform(0.0, 0.6)  # until it is started again
        return Fault(self._number, kind, target, round(seconds, 2))

    def _of_link(self, kind: Kind) -> Fault | None:
        if not self.cluster.links:
            return None
        target = self.rng.choice(list(self.cluster.links))
        directions = self.rng.choice((BOTH, ("up",), ("down",)))
        long = kind in ("withhold", "swallow", "half-open") and self.rng.random() < 0.25
        seconds = self.rng.uniform(4.0, 8.0) if long else self.rng.uniform(0.1, 2.0)
        amount = {"delay": self.rng.uniform(0.02, 0.3), "rate": self.rng.uniform(2e4, 1e6)}.get(kind, 0.0)
        if kind in DAMAGE:
            amount, seconds = self.rng.randrange(1, 4), DAMAGE_WAIT
        return Fault(self._number, kind, target, round(seconds, 2), directions, amount)

    def _allowed(self, fault: Fault) -> bool:
        impaired = self.cluster.timeline.impaired | self._reserved
        if fault.target in impaired or any(part in impaired for part in self._ends(fault.target)):
            return False
        if fault.kind in MOMENTARY:
            return True
        if fault.target == "router":
            return not impaired
        after = impaired | {fault.target}
        return any(after.isdisjoint(self.cluster.parts_of_pair(*pair)) for pair in self.cluster.pairs)

    def _ends(self, target: str) -> list[str]:
        """The processes at the ends of a link: dead ones have nothing to disturb."""
        return [name for name in self.cluster.names if name in target and target in self.cluster.links]

    # ---- carrying out

    async def _carry_out(self, fault: Fault) -> None:
        cluster, name = self.cluster, fault.target
        self._reserved.add(name)
        release = await self._aim(fault)
        since, pid = time.monotonic(), cluster.processes[name].pid if name in cluster.processes else 0
        self._begin(fault)
        if fault.kind == "kill":
            cluster.end_process(name)
            release()
            await self._after_kill(fault, pid, since)
        elif fault.kind == "drain":
            cluster.end_process(name, signal.SIGTERM)
            release()
            await self._after_drain(fault)
        elif fault.kind == "stop":
            cluster.signal(name, signal.SIGSTOP)
            release()
            await self._after_stop(fault, pid, since)
        else:
            release()
            self._disturb(fault, cluster.links[name])
            await self._after_disturbance(fault, cluster.links[name])
        self._reserved.discard(name)
        self.done.append(fault)

    async def _aim(self, fault: Fault) -> Callable[[], None]:
        """Wait until a request that needs the target is at the fault's station; returns what ends the holding.

        Stations that last for milliseconds are held: the network withholds what would end them.
        """
        if fault.station is None:
            return lambda: None
        timeline, links = self.cluster.timeline, self.cluster.links
        held = [each for each in self._holds(fault) if each[0] not in timeline.impaired]
        hold = f"{fault.name} hold"
        timeline.begin(hold, [link for link, _ in held], kind="hold", target=fault.target)
        for link, direction in held:
            links[link].conditions[direction].withheld = True

        def release() -> None:
            for link, direction in held:
                links[link].conditions[direction].withheld = False
                links[link].conditions[direction].notify()
            timeline.end(hold)

        await self.tail.wait(fault.target, fault.station, AIM_SECONDS)
        return release

    def _holds(self, fault: Fault) -> list[tuple[str, Direction]]:
        """Links to withhold so that a request stays at the fault's station."""
        near = [link for link in self.cluster.links.values() if self._touches(link.name, fault.target)]
        if fault.station == "queued":
            return [(link.name, "down") for link in near if link.kind == "control"][:1]
        if fault.station == "transfer":
            return [(link.name, "up") for link in near if link.kind == "bulk"][:2]
        if fault.station == "finished":
            return [(link.name, "up") for link in near if link.kind == "control" and "decode" in link.name]
        return []

    def _touches(self, link: str, target: str) -> bool:
        """Whether a link shares a node with the target; all do with the router."""
        nodes = [name for name in self.cluster.names if name != "router" and name in target]
        return not nodes or any(node in link for node in nodes)

    def _begin(self, fault: Fault) -> None:
        self.cluster.timeline.begin(
            fault.name,
            [fault.target],
            kind=fault.kind,
            target=fault.target,
            seconds=fault.seconds,
            directions=fault.directions,
            amount=fault.amount,
            aimed_at=fault.station,
        )

    async def _after_kill(self, fault: Fault, pid: int, since: float) -> None:
        cluster, name = self.cluster, fault.target
        if name != "router" and "router" not in cluster.timeline.impaired:
            await self._detected(fault, pid, since)
        await asyncio.sleep(fault.seconds)
        await asyncio.to_thread(cluster.processes[name].wait)
        launched = time.monotonic()
        cluster.launch(name)
        await self._returned(name, START_SECONDS)
        self.restarts.append(time.monotonic() - launched)
        cluster.timeline.end(fault.name)

    async def _after_drain(self, fault: Fault) -> None:
        """A node that is told to end finishes what it has and exits with 0."""
        cluster, process = self.cluster, self.cluster.processes[fault.target]
        try:
            status = await asyncio.to_thread(process.wait, DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            cluster.end_process(fault.target)
            status = await asyncio.to_thread(process.wait)
        if status != 0:
            cluster.not_recovered.append(f"{fault.target} ended with {status} after SIGTERM, not with 0")
        await asyncio.sleep(fault.seconds)
        cluster.launch(fault.target)
        await self._returned(fault.target, START_SECONDS)
        cluster.timeline.end(fault.name)

    async def _after_stop(self, fault: Fault, pid: int, since: float) -> None:
        cluster, name = self.cluster, fault.target
        if name != "router" and fault.seconds >= 4.0 and "router" not in cluster.timeline.impaired:
            await self._detected(fault, pid, since)
        await asyncio.sleep(max(0.0, since + fault.seconds - time.monotonic()))
        cluster.signal(name, signal.SIGCONT)
        await asyncio.sleep(0.3)  # what it last said of itself must not count as recovery
        await self._returned(name, ABSENT_SECONDS)
        cluster.timeline.end(fault.name)

    async def _returned(self, name: str, seconds: float) -> None:
        """Until the router lists the process. One that does not come back by itself is noted and started again."""
        cluster = self.cluster
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await cluster.wait_up(name)
                return
            except TimeoutError:
                pass
            if cluster.timeline.impaired & {"router", link_name("router", name)}:
                continue
            pid = cluster.processes[name].pid
            cluster.not_recovered.append(
                f"{name} (pid {pid}) was not listed {seconds:g} s after its fault ended"
            )
            cluster.timeline.note("absent", part=name)
            cluster.end_process(name)
            await asyncio.to_thread(cluster.processes[name].wait)
            cluster.launch(name)
            seconds = START_SECONDS

    async def _detected(self, fault: Fault, pid: int, since: float) -> None:
        """Note how long the router listed the node; longer than any bound is left to the checker."""
        try:
            async with asyncio.timeout(10.0):
                await self.cluster.wait_gone(fault.target, pid)
        except TimeoutError:
            self.cluster.timeline.note("not detected", fault=fault.name, target=fault.target)
        seconds = time.monotonic() - since
        self.detections.append((fault.kind, fault.target.rpartition("-")[0], seconds))
        self.cluster.timeline.note("detected", fault=fault.name, kind=fault.kind, seconds=seconds)

    def _disturb(self, fault: Fault, link: Link) -> None:
        if fault.kind in ("reset", "refuse"):
            link.refusing = fault.kind == "refuse"
            link.reset()
        for direction in fault.directions:
            _apply(fault, link.conditions[direction])

    async def _after_disturbance(self, fault: Fault, link: Link) -> None:
        if fault.kind != "reset":
            await self._last(fault, [link.conditions[direction] for direction in fault.directions])
        link.heal()
        if fault.kind == "half-open":
            link.reset()  # the path forgets the connection, as a NAT does
        self.cluster.timeline.end(fault.name)
        if link.kind == "control":
            self._reserved.discard(fault.target)
            await self._returned(fault.target.removeprefix("router-"), ABSENT_SECONDS)

    async def _last(self, fault: Fault, conditions: Sequence[Conditions]) -> None:
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            if fault.kind in DAMAGE and not any(each.flips + each.cuts + each.repeats for each in conditions):
                return
            await asyncio.sleep(min(0.05, max(0.0, until - time.monotonic())))


def _apply(fault: Fault, conditions: Conditions) -> None:
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
