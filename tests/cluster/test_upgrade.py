"""An upgrade to a version with other protocols, while clients stream answers: no request fails, no answer changes."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import aiohttp
import pytest

from tests.cluster.check_restarts import PROMPTS, streamed
from tests.cluster.fork_server import Started
from tests.cluster.harness import ROOT, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores
CLIENTS = 2
TOKENS = 30
# The file and the name of each version number that processes compare.
VERSIONS = {
    "common/messages/protocol.py": "CONTROL_PROTOCOL_VERSION",
    "kv_transfer/messages.py": "KV_PROTOCOL_VERSION",
    "kv_transfer/handoff_record.py": "VERSION",
}
PACKAGES = ("common", "router", "prefill_node", "decode_node", "kv_transfer")


class LaterVersion:
    """A copy of the product with higher version numbers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for package in PACKAGES:
            shutil.copytree(ROOT / package, directory / package)
        for file, name in VERSIONS.items():
            path = directory / file
            line = re.compile(rf"^({name}: Final = )(\d+)$", re.MULTILINE)
            text, count = line.subn(lambda found: f"{found[1]}{int(found[2]) + 1}", path.read_text())
            assert count == 1, file
            path.write_text(text)

    def start(
        self, module: Sequence[str], directory: Path, environment: dict[str, str], log: BinaryIO
    ) -> Started:
        """Start a process of this version, see `StartProcess`."""
        environment = {**environment, "PYTHONPATH": str(self._directory)}
        command = [sys.executable, "-m", *module]
        return subprocess.Popen(command, cwd=self._directory, env=environment, stdout=log, stderr=log)


@dataclass
class Balancer:
    """Sends each request to a router that is ready and not taken out."""

    cluster: RunningCluster
    expected: list[str] = field(default_factory=list)  # texts of PROMPTS
    answered: Counter[str] = field(default_factory=Counter)  # right answers by router
    problems: list[str] = field(default_factory=list)
    over: bool = False
    out: str = ""  # the router that gets no more requests
    opening: Counter[str] = field(default_factory=Counter)  # requests whose answer has not begun, by router

    async def ready(self, router: str) -> bool:
        async with self.cluster.at(router) as client:
            try:
                async with client.session.get("/ready") as response:
                    return response.status == 200
            except (aiohttp.ClientError, OSError):
                return False

    async def wait_ready(self, router: str) -> None:
        async with asyncio.timeout(2 * PATIENCE):
            while not await self.ready(router):
                await asyncio.sleep(0.1)

    async def take_out(self, router: str) -> None:
        """Send no more requests to a router, and return once each of those that it has is being answered."""
        self.out = router
        async with asyncio.timeout(2 * PATIENCE):
            while self.opening[router]:
                await asyncio.sleep(0.01)

    async def answers(self, number: int) -> None:
        """Send one request after the other until `over`."""
        while not self.over:
            number += 1
            for router in self.cluster.router_names:
                if await self.ready(router) and router != self.out:
                    await self.request(router, number % len(PROMPTS))
                    break
            else:
                self.problems.append("no router is ready")
                await asyncio.sleep(1.0)

    async def request(self, router: str, prompt: int) -> None:
        begun = asyncio.Event()
        begun_once = partial(self._begun, router, begun)
        self.opening[router] += 1
        async with self.cluster.at(router) as client:
            try:
                text = await streamed(client, prompt, TOKENS, begun_once)
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                self.problems.append(f"{router}: {error!r}"[:500])
                return
            finally:
                begun_once()
        if text == self.expected[prompt]:
            self.answered[router] += 1
        else:
            self.problems.append(f"{router}: {text}")

    def _begun(self, router: str, begun: asyncio.Event) -> None:
        if not begun.is_set():
            begun.set()
            self.opening[router] -= 1


async def end(cluster: RunningCluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.kill(name, signal.SIGTERM)
    for name in names:
        await asyncio.to_thread(cluster.processes[name].wait, 2 * PATIENCE)
        assert cluster.processes[name].returncode == 0, name


async def refused(cluster: RunningCluster, names: Sequence[str]) -> None:
    """Wait until a router of another version has refused these nodes."""
    async with asyncio.timeout(PATIENCE):
        while not all("run the same version of tandem" in cluster.log(name) for name in names):
            await asyncio.sleep(0.1)


async def test_an_upgrade_fails_no_request(tmp_path: Path) -> None:
    """First a router and a node of each role are replaced, then the others: each router has nodes of its version."""
    later = LaterVersion(tmp_path / "later")
    async with RunningCluster(tmp_path, 2, 2, routers=2) as cluster:
        balancer = Balancer(cluster)
        async with cluster.at("router") as client:
            for prompt in range(len(PROMPTS)):
                balancer.expected.append(await streamed(client, prompt, TOKENS))
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(balancer.answers(number))
            cluster.start = later.start
            await balancer.take_out("router.1")
            for names in (["router.1"], ["prefill-1", "decode-1"]):
                await end(cluster, names)
                for name in names:
                    cluster.launch(name)
            await balancer.wait_ready("router.1")
            await balancer.take_out("router")
            await refused(cluster, ["prefill-1", "decode-1"])
            # The last router of the old version first finishes its requests, for which it needs the old nodes.
            for names in (["router"], ["prefill-0", "decode-0"]):
                await end(cluster, names)
            for name in ("router", "prefill-0", "decode-0"):
                cluster.launch(name)
            await cluster.wait_nodes()
            balancer.out = ""
            before = balancer.answered["router"]
            async with asyncio.timeout(PATIENCE):
                while balancer.answered["router"] < before + CLIENTS and not balancer.problems:
                    await asyncio.sleep(0.1)
            balancer.over = True
    assert balancer.problems == []
    assert min(balancer.answered.values()) > 0
    assert set(balancer.answered) == {"router", "router.1"}
