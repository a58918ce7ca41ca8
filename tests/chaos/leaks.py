"""Invariant I5: nothing is still held when no request runs: pages, descriptors, sockets, shared memory, files."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.chaos.cluster import ChaosCluster
from tests.cluster.harness import Client

UP_AND_IDLE = 60.0  # seconds until all processes are listed and hold nothing
SETTLED = 30.0  # seconds until kernel and processes have noticed broken connections
SPARE = 2  # descriptors: one may be in the making when they are counted
EPHEMERAL = 32_768  # first port that the kernel assigns
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Held:
    """What one process holds: kernel objects by kind ("socket", "anon_inode", "file") and mapped segments."""

    descriptors: dict[str, int]
    segments: int
    connections: dict[str, int]  # TCP, as "own port -> peer's port", with "*" for ephemeral ports

    @property
    def total(self) -> int:
        return sum(self.descriptors.values())


@dataclass(frozen=True)
class Holdings:
    """What the whole cluster holds."""

    processes: dict[str, Held]
    segments: frozenset[str]  # files in /dev/shm, of all its past and present processes
    sockets: frozenset[str]  # files in the run directory


def take(cluster: ChaosCluster) -> Holdings:
    processes = {name: held_by(process.pid) for name, process in cluster.processes.items()}
    names = [entry.name for entry in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []
    sockets = [entry.name for entry in cluster.disk.run_dir.iterdir()]
    return Holdings(
        {name: held for name, held in processes.items() if held is not None},
        frozenset(name for name in names if owner(name) in cluster.launched),
        frozenset(sockets),
    )


def owner(segment: str) -> int:
    """Return the pid in the name of a segment (kv_transfer/transport/one_host/segment.py); 0 for files of others."""
    parts = segment.split(".")
    return int(parts[3]) if parts[0] == "tandem" and len(parts) > 3 and parts[3].isdigit() else 0


def held_by(pid: int) -> Held | None:
    """Return what a process holds; None once it has ended."""
    try:
        links = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
        maps = Path(f"/proc/{pid}/maps").read_text()
        table = Path(f"/proc/{pid}/net/tcp").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    kinds: Counter[str] = Counter()
    inodes = set()
    for link in links:
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        kind, _, rest = target.partition(":")
        kinds["file" if target.startswith("/") else target if kind == "anon_inode" else kind] += 1
        inodes.add(rest.strip("[]"))
    mapped = {line.rpartition(" ")[2] for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line}
    return Held(dict(kinds), len(mapped), _connections(table, inodes))


def _connections(table: str, inodes: set[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes:
            ports = [int(fields[at].partition(":")[2], 16) for at in (1, 2)]
            found[" -> ".join("*" if port >= EPHEMERAL else str(port) for port in ports)] += 1
    return dict(found)


async def find(cluster: ChaosCluster, before: Holdings) -> list[str]:
    """Describe what is held now beyond `before`; waits for what takes a while to be released."""
    leaks = []
    async with Client(cluster.url) as client:
        try:
            await cluster.wait_nodes(UP_AND_IDLE)
            await client.wait_idle(UP_AND_IDLE)
        except (AssertionError, aiohttp.ClientError, OSError) as error:
            leaks.append(f"not up and idle: {error!r}"[:2000])
    until = time.monotonic() + SETTLED
    while (more := differences(before, take(cluster))) and time.monotonic() < until:
        await asyncio.sleep(0.5)
    return leaks + more


def differences(before: Holdings, after: Holdings) -> list[str]:
    leaks = []
    for name, held in before.processes.items():
        now = after.processes.get(name)
        if now is None:
            leaks.append(f"{name} has ended by itself")
            continue
        if now.total > held.total + SPARE:
            text = f"{name} has {now.total} open descriptors, {held.total} before the first fault"
            new, old = ({**each.descriptors, **each.connections} for each in (now, held))
            leaks.append(
                f"{text}; more or fewer: { {name: count - old.get(name, 0) for name, count in new.items()} }"
            )
        if now.segments > held.segments:
            leaks.append(f"{name} maps {now.segments} segments, {held.segments} before the first fault")
    if len(after.segments) > len(before.segments):
        leaks.append(f"segments in {SHARED_MEMORY} that no process needs: {sorted(after.segments)[:10]}")
    if after.sockets - before.sockets:
        leaks.append(
            f"files in the run directory that were not there: {sorted(after.sockets - before.sockets)[:10]}"
        )
    return leaks
