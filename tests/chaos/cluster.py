"""The cluster under test: real processes on virtual hosts, restarted by the harness as by a supervisor."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.disk import Disk
from tests.chaos.ending import end_tasks
from tests.chaos.namespaces import Host, Namespace
from tests.chaos.proxy import Link
from tests.chaos.timeline import Timeline
from tests.cluster import fork_server
from tests.cluster.harness import ENV, ROOT, RunningCluster

MODELS = ROOT / "deploy" / "tiny_models"
POLL_SECONDS = 0.1
ANSWER_SECONDS = 2.0  # for the router to say which nodes it lists
PEER_PORT = 20_000
BULK_PORT = 21_000
HOST_MIB = 24  # of each node, for cached prefixes and retracted requests
UNDO = Path(__file__).parent / "undo"  # its sitecustomize.py patches the product in every started process
# The bounds of the time before the two defects of docs/faults.md (`--undo`) were fixed: waits were limited by time,
# not by progress.
TIME_ONLY = {"slots_timeout": 600.0, "first_page_timeout": 600.0, "stall_timeout": 60.0}


@dataclass(frozen=True)
class Setup:
    """What a run serves."""

    prefill: int = 2
    decode: int = 2
    transport: str = "tcp"
    algorithm: str = "eagle3"
    namespaces: bool = True
    images: bool = True  # whether the model accepts pictures
    undo: str | None = None  # the fix to remove from the product: R1 or R2


def link_name(*ends: str) -> str:
    return "-".join(ends)


class ChaosCluster(RunningCluster):
    """A running cluster. With `setup.namespaces` every node has its own network namespace; the router has none."""

    def __init__(self, directory: Path, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.seed = seed
        self.disk = Disk(setup.namespaces)
        super().__init__(directory, setup.prefill, setup.decode, self._sections(setup))
        self.events = directory / "events"
        self.hosts: dict[str, Host] = {}
        self.links: dict[str, Link] = {}
        self.proxy_ports: dict[str, int] = {}  # node -> its port to the router, without namespaces
        self.timeline = Timeline()
        # Processes that ended unexpectedly or did not return by themselves.
        self.not_recovered: list[str] = []
        self.launched: set[int] = set()  # pids
        self.listed: dict[str, int] = {}  # name -> pid of the process that the router lists as up
        self._asked = 0.0  # when `listed` was requested from the router
        self._expected: set[str] = set()  # processes that the harness ended
        self._watcher: asyncio.Task[None] | None = None
        self._recoveries: list[asyncio.Task[None]] = []
        self._write_file()

    def _sections(self, setup: Setup) -> dict[str, Any]:
        family = "tiny-vision" if setup.images else "tiny"
        sections: dict[str, Any] = {
            "transfer": {"transport": setup.transport},
            "process": {"run_dir": str(self.disk.run_dir)},
        }
        if setup.images:
            sections["model"] = {"path": str(MODELS / family)}
        if setup.algorithm != "none":
            sections["speculation"] = {"algorithm": setup.algorithm}
            if setup.algorithm != "ngram":
                sections["speculation"]["draft_model_path"] = str(MODELS / f"{family}-{setup.algorithm}")
        return sections

    def _write_file(self) -> None:
        """Write the harness's cluster file, with the product's own health bounds and with fixed ports."""
        config = yaml.safe_load(self.file.read_text())
        del config["health"]
        config["transfer"] = {"transport": self.setup.transport}
        if self.setup.undo is not None:
            config["transfer"] |= TIME_ONLY
        config["router"]["max_crashes"] = 0  # external kills are not crashes caused by a request
        config["process"]["event_log"] = str(self.events)
        config["prefill"]["host_mib"] = config["decode"]["host_mib"] = HOST_MIB
        # Round robin on both sides would use only two of four pairs.
        config["router"]["placement"] = {"prefill": "round_robin", "decode": "least_loaded"}
        if self.setup.transport == "tcp":
            self.control_port = int(config["router"]["control_address"].rpartition(":")[2])
            for index, node in enumerate(config["prefill"]["nodes"] if self.setup.namespaces else []):
                node["peer_address"] = f"tcp://127.0.0.1:{PEER_PORT + index}"
            for index, node in enumerate(config["decode"]["nodes"] if self.setup.namespaces else []):
                node["bulk_port"] = BULK_PORT + index
        self.file.write_text(yaml.safe_dump(config))

    # ---- the network

    def make_network(self) -> None:
        """Create namespaces, and a proxied link for every pair of processes that communicate."""
        prefill = [f"prefill-{i}" for i in range(self.prefill)]
        decode = [f"decode-{i}" for i in range(self.decode)]
        isolated = self.setup.namespaces and self.setup.transport == "tcp"
        router = self.hosts["router"] = Host()
        for name in [*prefill, *decode]:
            self.hosts[name] = Host()
            if isolated:
                namespace = self.hosts[name] = Namespace(name)
                namespace.create()
        if self.setup.transport != "tcp":
            return
        if not isolated:
            # Nodes are configured with the proxy's address; connections that bypass it are never disturbed.
            for name in [*prefill, *decode]:
                port = self.proxy_ports[name] = self._port()
                self._link(link_name("router", name), "control", router, router, port, self.control_port)
            return
        for name in [*prefill, *decode]:
            self._link(link_name("router", name), "control", self.hosts[name], router, self.control_port)
        for p, prefill_name in enumerate(prefill):
            for d, decode_name in enumerate(decode):
                near, far = self.hosts[prefill_name], self.hosts[decode_name]
                name = link_name(prefill_name, decode_name)
                self._link(f"{name}-peer", "peer", far, near, PEER_PORT + p)
                self._link(f"{name}-bulk", "bulk", near, far, BULK_PORT + d)

    def _link(self, name: str, kind: str, near: Host, far: Host, port: int, far_port: int = 0) -> None:
        self.links[name] = Link(name, kind, near, far, port, self.seed + len(self.links), far_port)
        self.links[name].start()

    def parts_of_pair(self, prefill: str, decode: str) -> list[str]:
        """Return the processes and links that a request on this pair needs."""
        name = link_name(prefill, decode)
        links = [link_name("router", prefill), link_name("router", decode), f"{name}-peer", f"{name}-bulk"]
        return ["router", prefill, decode, *(link for link in links if link in self.links)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(f"prefill-{p}", f"decode-{d}") for p in range(self.prefill) for d in range(self.decode)]

    # ---- processes

    def launch(self, name: str) -> None:
        role = name.rpartition("-")[0]
        module = ["router"] if name == "router" else [f"{role}_node", "--name", name]
        module += ["--cluster", str(self.file)]
        if name in self.proxy_ports:
            module += ["--set", f"router.control_address=tcp://127.0.0.1:{self.proxy_ports[name]}"]
        self._expected.discard(name)
        with (self.disk.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = fork_server.start(
                module, ROOT, self._environment(), log, self.hosts[name].path
            )
        self.launched.add(self.processes[name].pid)

    def _environment(self) -> dict[str, str]:
        if self.setup.undo is None:
            return ENV
        return {**ENV, "PYTHONPATH": f"{UNDO}:{ENV['PYTHONPATH']}", "TANDEM_CHAOS_UNDO": self.setup.undo}

    def log(self, name: str) -> str:
        return (self.disk.logs / f"{name}.log").read_text(errors="replace")

    def end_process(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process whose end is expected from now on."""
        self._expected.add(name)
        self.processes[name].send_signal(number)

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Signal a process. Return False if it has ended."""
        if self.processes[name].poll() is not None:
            return False
        self.processes[name].send_signal(number)
        return True

    def serving(self) -> dict[str, int]:
        """Return name -> pid of all processes that no fault affects."""
        impaired = self.timeline.impaired
        return {name: each.pid for name, each in self.processes.items() if name not in impaired}

    # ---- life

    async def __aenter__(self) -> ChaosCluster:
        try:
            self.disk.mount()
            self.make_network()
            await super().__aenter__()
        except BaseException:
            self._take_down()
            raise
        self._watcher = asyncio.create_task(self.watch())
        return self

    async def __aexit__(self, *error: Any) -> None:
        watching = [] if self._watcher is None else [self._watcher]
        # Those that do not end are named when the run ends (run.py).
        await end_tasks([*watching, *self._recoveries])
        self.disk.free()
        for link in self.links.values():
            link.heal()
        try:
            self._expected |= set(self.processes)
            await super().__aexit__(*error)
        finally:
            self._take_down()

    def _take_down(self) -> None:
        """Remove those parts of network and disk that exist."""
        for link in self.links.values():
            link.stop()
        for host in self.hosts.values():
            host.delete()
        self.disk.remove(self.directory)

    async def wait_up(self, name: str) -> None:
        """Wait until the router lists the current process with this name."""
        since = time.monotonic()
        while self.listed.get(name) != self.processes[name].pid or self._asked < since:
            await asyncio.sleep(POLL_SECONDS / 2)

    async def wait_gone(self, name: str, pid: int) -> None:
        """Wait until the router no longer lists this process of the node."""
        since = time.monotonic()
        while self.listed.get(name) == pid or self._asked < since:
            await asyncio.sleep(POLL_SECONDS / 4)

    async def watch(self) -> None:
        """Keep `listed` up to date, and restart processes that end by themselves, until cancelled."""
        while True:
            try:
                async with self.operator() as client:
                    while True:
                        asked = time.monotonic()
                        # asyncio.wait_for of Python 3.11 loses a cancellation that meets the answer.
                        async with asyncio.timeout(ANSWER_SECONDS):
                            info = await client.info()
                        self._learn(info, asked)
                        await asyncio.sleep(POLL_SECONDS)
            except Exception as error:  # the router may be dead, stopped or starting
                if self.listed:
                    self.timeline.note("router unreachable", error=repr(error))
                self.listed, self._asked = {}, time.monotonic()
            self._restart_crashed()
            await asyncio.sleep(POLL_SECONDS)

    def _learn(self, info: dict[str, Any], asked: float) -> None:
        up = {node["name"]: int(node["pid"]) for node in info["nodes"] if node["state"] == "up"}
        up["router"] = self.processes["router"].pid
        for name in set(up) | set(self.listed):
            if up.get(name) != self.listed.get(name):
                self.timeline.note("listed", part=name, pid=up.get(name, 0), asked=asked)
        self.listed, self._asked = up, asked
        self._restart_crashed()

    def _restart_crashed(self) -> None:
        for name, process in self.processes.items():
            status = process.poll()
            if status is not None and name not in self._expected:
                self.not_recovered.append(f"{name} ended with {status}: {self.log(name)[-600:]}")
                fault = f"crash {len(self.not_recovered)}"
                self.timeline.begin(fault, [name], kind="crash", target=name)
                self.launch(name)
                self._recoveries.append(asyncio.create_task(self._recover(fault, name)))

    async def _recover(self, fault: str, name: str) -> None:
        await self.wait_up(name)
        self.timeline.end(fault)


def new_run_directory() -> Path:
    path = Path(f"/tmp/tandem-chaos-{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    return path
