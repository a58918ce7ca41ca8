"""Executes faults, several at a time, and waits until their targets have recovered."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.cluster import ChaosCluster, link_name
from tests.chaos.drawing import Drawer
from tests.chaos.event_tail import EventTail
from tests.chaos.faults import BURST_INTERVAL, BURST_SECONDS, DAMAGE, DISK, Fault, apply
from tests.chaos.load import Load
from tests.chaos.proxy import Conditions, Direction, Link

REPORT_EVERY = 100  # faults
AIM_SECONDS = 1.5  # longest wait of a fault for a request at its station
DRAIN_SECONDS = 60.0  # for a node to end after SIGTERM: health.drain_timeout, on a busy machine
START_SECONDS = 90.0  # until a restarted process is listed, on a busy machine
RESETS, RESET_INTERVAL = 3, 0.7  # for peer links after a restart
ABSENT_SECONDS = 20.0  # until a process that was only disturbed is listed again


@dataclass
class Injector:
    """Executes faults. `run` executes all faults of its drawer, on different parts at the same time."""

    cluster: ChaosCluster
    drawer: Drawer
    tail: EventTail
    load: Load
    done: list[Fault] = field(default_factory=list)
    detections: list[tuple[str, str, float]] = field(default_factory=list)  # (kind, role, seconds)
    restarts: list[float] = field(default_factory=list)
    _reserved: set[str] = field(default_factory=set)  # targets of waiting faults
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        """Spread the faults evenly over `seconds`; delayed ones are followed faster. Raises what a fault raised."""
        begun = time.monotonic()
        faults = self.drawer.faults
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(faults):
                    due = begun + seconds * index / faults
                    if index % REPORT_EVERY == 0:
                        print(f"{index} faults after {time.monotonic() - begun:.0f} s", flush=True)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    while (fault := self.drawer.draw(self._reserved)) is None:
                        await asyncio.sleep(0.05)
                    group.create_task(self._carry_out(fault))
        except* Exception as errors:
            raise errors.exceptions[0] from errors

    # ---- execution

    async def _carry_out(self, fault: Fault) -> None:
        cluster, name = self.cluster, fault.target
        self._reserved.add(name)
        if fault.kind == "restart":
            await self._restart(fault)
            self.done.append(fault)
            return
        release = await self._aim(fault)
        since, pid = time.monotonic(), cluster.processes[name].pid if name in cluster.processes else 0
        self._begin(fault)
        if fault.kind == "kill":
            cluster.end_process(name)
            release()
            await self._after_kill(fault, pid, since)
        elif fault.kind == DISK:
            await self._fill_disk(fault)
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
        """Wait until a request that needs the target is at the fault's station; return a function that ends the hold.

        Stations that last only milliseconds are held: the network withholds what would end them.
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

        if await self.tail.wait(fault.target, fault.station, AIM_SECONDS):
            self.drawer.hit(fault)
        return release

    def _holds(self, fault: Fault) -> list[tuple[str, Direction]]:
        """Return the links to withhold so that a request stays at the fault's station."""
        near = [link for link in self.cluster.links.values() if self._touches(link.name, fault.target)]
        if fault.station == "queued":
            return [(link.name, "down") for link in near if link.kind == "control"][:1]
        if fault.station == "transfer":
            return [(link.name, "up") for link in near if link.kind == "bulk"][:2]
        if fault.station == "finished":
            decode = [each for each in self.cluster.links.values() if each.name.startswith("router-decode")]
            return [(link.name, "up") for link in decode if link in near] or [
                (link.name, "up") for link in decode[:1]
            ]
        return []

    def _touches(self, link: str, target: str) -> bool:
        """Return whether a link shares a node with the target; every link does if the target is the router."""
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
        await self._returned(name, START_SECONDS, fault)
        self.restarts.append(time.monotonic() - launched)
        cluster.timeline.end(fault.name)

    async def _restart(self, fault: Fault) -> None:
        """Kill a prefill node while a long answer that it started runs on a decode node; then break links a few times.

        Its successor starts at once, and short requests follow, one per BURST_INTERVAL. The connection that was made
        for the long answer must not take over the route of the new ones.
        """
        cluster, name = self.cluster, fault.target
        async with asyncio.TaskGroup() as group:
            for _ in range(cluster.prefill):  # placed in turn, so one of them on this node
                group.create_task(self.load.long_answer())
            await self.tail.wait(name, "streaming", AIM_SECONDS)
            self._begin(fault)
            cluster.end_process(name)
            await asyncio.to_thread(cluster.processes[name].wait)
            cluster.launch(name)
            group.create_task(self.load.burst(BURST_SECONDS, BURST_INTERVAL))
            await self._returned(name, START_SECONDS, fault)
            cluster.timeline.end(fault.name)
            self._reserved.discard(name)
            for number in range(RESETS):
                await asyncio.sleep(RESET_INTERVAL)
                self._reset_peer_links(f"{fault.name} reset {number}", name)

    def _reset_peer_links(self, fault: str, name: str) -> None:
        """Reset all peer links of the node: peers reconnect, also those of its earlier incarnation."""
        links = [link for link in self.cluster.links.values() if link.kind == "peer" and name in link.name]
        self.cluster.timeline.begin(fault, [link.name for link in links], kind="hold", target=name)
        for link in links:
            link.reset()
        self.cluster.timeline.end(fault)

    async def _fill_disk(self, fault: Fault) -> None:
        """Fill the disk of the logs and the run directory for a while, which must have no other effect."""
        disk, until = self.cluster.disk, time.monotonic() + fault.seconds
        while time.monotonic() < until:  # repeat: rotated or removed files leave space
            await asyncio.to_thread(disk.fill)
            await asyncio.sleep(0.2)
        disk.free()
        self.cluster.timeline.end(fault.name)

    async def _after_drain(self, fault: Fault) -> None:
        """Check that a node asked to end finishes its requests and exits with 0."""
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
        await self._returned(fault.target, START_SECONDS, fault)
        cluster.timeline.end(fault.name)

    async def _after_stop(self, fault: Fault, pid: int, since: float) -> None:
        cluster, name = self.cluster, fault.target
        if name != "router" and fault.seconds >= 4.0 and "router" not in cluster.timeline.impaired:
            await self._detected(fault, pid, since)
        await asyncio.sleep(max(0.0, since + fault.seconds - time.monotonic()))
        cluster.signal(name, signal.SIGCONT)
        await asyncio.sleep(0.3)  # its last report must not count as recovery
        await self._returned(name, ABSENT_SECONDS, fault)
        cluster.timeline.end(fault.name)

    async def _returned(self, name: str, seconds: float, fault: Fault) -> None:
        """Wait until the router lists the process. One that does not return by itself is recorded and restarted.

        The time does not count while another fault holds what it needs, or while the machine ran other processes.
        """
        cluster, since = self.cluster, time.monotonic()
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await cluster.wait_up(name)
                return
            except TimeoutError:
                pass
            if cluster.timeline.held_by_others(fault.name) & {"router", name, link_name("router", name)}:
                since = time.monotonic()
            if time.monotonic() - since - cluster.timeline.starved_since(since) < seconds:
                continue
            pid = cluster.processes[name].pid
            cluster.not_recovered.append(
                f"{name} (pid {pid}) was not listed {seconds:g} s after its fault ended"
            )
            cluster.timeline.note("absent", part=name)
            cluster.end_process(name)
            await asyncio.to_thread(cluster.processes[name].wait)
            cluster.launch(name)
            since, seconds = time.monotonic(), START_SECONDS

    async def _detected(self, fault: Fault, pid: int, since: float) -> None:
        """Record how long the router listed the node; the checker judges times beyond the bound."""
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
            apply(fault, link.conditions[direction])

    async def _after_disturbance(self, fault: Fault, link: Link) -> None:
        if fault.kind != "reset":
            await self._last(fault, [link.conditions[direction] for direction in fault.directions])
        link.heal()
        if fault.kind == "half-open":
            link.reset()  # the path forgets the connection, as a NAT does
        self.cluster.timeline.end(fault.name)
        if link.kind == "control":
            self._reserved.discard(fault.target)
            await self._returned(fault.target.removeprefix("router-"), ABSENT_SECONDS, fault)

    async def _last(self, fault: Fault, conditions: Sequence[Conditions]) -> None:
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            if fault.kind in DAMAGE and not any(each.flips + each.cuts + each.repeats for each in conditions):
                return
            await asyncio.sleep(min(0.05, max(0.0, until - time.monotonic())))
