"""Real clusters for tests: every process has the entry point that users start, and tests use only HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import aiohttp
import yaml

from common.config.router_processes import names_router, router_name
from tests.cluster import fork_server
from tests.fakes import rank_forks
from tests.fakes.proc_files import listening_sockets, proc_text, with_children
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "deploy" / "tiny_models" / "tiny-target"
START_TIMEOUT = 600.0
# A stalled machine must not count as a fault.
PATIENT = {"node_timeout": 600.0, "router_timeout": 600.0, "loop_timeout": 600.0}
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

# Arguments: the module with its arguments, the directory, the environment, the log.
StartProcess = Callable[[Sequence[str], Path, dict[str, str], BinaryIO], fork_server.Started]
PATIENT_TRANSFER = {"slots_timeout": 600.0, "first_page_timeout": 600.0, "stall_timeout": 600.0}


def start_new(
    module: Sequence[str], directory: Path, environment: dict[str, str], log: BinaryIO
) -> fork_server.Started:
    """Run `python -m MODULE ...` as a new process: CUDA does not work in a fork of a process that has asked for it."""
    command = [sys.executable, "-m", *module]
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)


def hold_port() -> socket.socket:
    """Bind a port without listening: nobody else gets the port, but a server that reuses addresses can bind it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@dataclass
class RunningCluster:
    """Processes by name: "router", "prefill-0", "decode-0", ... A context manager, in tests an async one."""

    directory: Path
    prefill: int = 1
    decode: int = 1
    config: dict[str, Any] = field(default_factory=dict)  # sections, merged over those of the harness
    processes: dict[str, fork_server.Started] = field(default_factory=dict)
    held: list[socket.socket] = field(default_factory=list)  # reserved ports
    blocking: tuple[str, ...] = ()  # nodes that `block` can block
    withholding: tuple[str, ...] = ()  # decode nodes: see tests/fakes/withholding_node.py
    punctual: tuple[str, ...] = ()  # nodes: see tests/fakes/punctual_node.py
    late: tuple[str, ...] = ()  # nodes that do not run until the test launches them
    addresses: dict[str, int] = field(default_factory=dict)  # listener of a tcp link -> port
    router_module: tuple[str, ...] = ("router",)  # module for `python -m`, with its first arguments
    # ranks of the nodes that have several
    ranks: Mapping[str, int] = field(default_factory=dict)
    # (table, row) added in every process: see tests/fakes/with_rows.py
    rows: tuple[tuple[str, str], ...] = ()
    routers: int = 1  # processes: "router", "router.1" ...
    movable: int = 0  # nodes that can change their role: "flex-0" ..., decode nodes at first
    # Of each node: four of the longest contexts. With the default each node would fill hundreds of MB with zeros.
    pool_tokens: int | Literal["auto"] = 16_384
    start: StartProcess = fork_server.start  # how `launch` starts a process

    def __post_init__(self) -> None:
        self.port = self._port()
        self.file = self.directory / "cluster.yaml"
        tcp = self.config.get("transfer", {}).get("transport") == "tcp"
        base: dict[str, Any] = {
            "model": {"path": str(MODEL), "served_name": "tiny"},
            "router": {"port": self.port, "queue_wait": 600.0, "processes": self.routers},
            "prefill": {
                "pool_tokens": self.pool_tokens,
                "nodes": [
                    *(self._prefill_node(f"prefill-{i}", tcp) for i in range(self.prefill)),
                    *(self._prefill_node(name, tcp) for name in self.movable_names),
                ],
            },
            "decode": {
                "pool_tokens": self.pool_tokens,
                "nodes": [
                    *({"name": f"decode-{i}"} for i in range(self.decode)),
                    *({"name": name} for name in self.movable_names),
                ],
            },
            "movable": {"nodes": [{"name": name} for name in self.movable_names]},
            "health": {**PATIENT},
            "transfer": {**PATIENT_TRANSFER},
            # Short, because the path of an ipc socket is limited.
            "process": {"run_dir": f"/tmp/tandem-test-{secrets.token_hex(4)}"},
        }
        if tcp:
            self.addresses["router"] = self._port()
            base["router"]["control_address"] = f"tcp://127.0.0.1:{self.addresses['router']}"
        for node in (*base["prefill"]["nodes"], *base["decode"]["nodes"]):
            node["tensor_parallel"] = self.ranks.get(node["name"], 1)
        for section, values in self.config.items():
            base.setdefault(section, {}).update(values)
        self.run_dir = Path(base["process"]["run_dir"])
        self.file.write_text(yaml.safe_dump(base))

    def _port(self) -> int:
        self.held.append(hold_port())
        return int(self.held[-1].getsockname()[1])

    def _prefill_node(self, name: str, tcp: bool) -> dict[str, Any]:
        node: dict[str, Any] = {"name": name}
        if tcp:
            self.addresses[node["name"]] = self._port()
            node["peer_address"] = f"tcp://127.0.0.1:{self.addresses[node['name']]}"
        return node

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def names(self) -> list[str]:
        prefill = [f"prefill-{i}" for i in range(self.prefill)]
        decode = [f"decode-{i}" for i in range(self.decode)]
        return [*self.router_names, *prefill, *decode, *self.movable_names]

    @property
    def movable_names(self) -> list[str]:
        return [f"flex-{i}" for i in range(self.movable)]

    @property
    def router_names(self) -> list[str]:
        return [router_name(index) for index in range(self.routers)]

    def at(self, router: str) -> Client:
        """Return a client of one of several router processes, over its own socket."""
        return Client("http://localhost", self.run_dir / f"{router}.own.sock")

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "router.admin.sock"

    def operator(self) -> Client:
        """Return a client of the admin socket: without a key; its /server_info has process ids and incarnations."""
        return Client("http://localhost", self.admin_socket)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def block(self, name: str, after: int = 0) -> None:
        """Block the main loop in a forward, after `after` further ones, until `unblock`. Only for `blocking` nodes."""
        assert name in self.blocking
        written = self.directory / f"next-{name}"
        written.write_text(str(after))
        written.rename(self.directory / f"block-{name}")

    def is_blocked(self, name: str) -> bool:
        """Return whether the node has reached the blocking forward."""
        return (self.directory / f"block-{name}.reached").exists()

    def withheld(self, name: str) -> set[str]:
        """Return the ids of the requests whose tokens the node withholds. Only for `withholding` nodes."""
        file = self.directory / f"withheld-{name}"
        return set(file.read_text().splitlines()) if file.exists() else set()

    def silences(self, name: str) -> dict[str, float]:
        """Return how long the node's main loop was silent so far, as in Silences. Only for `punctual` nodes."""
        found: dict[str, float] = json.loads((self.directory / f"silences-{name}").read_bytes())
        return found

    def unblock(self, name: str) -> None:
        (self.directory / f"block-{name}").unlink()

    def _node_module(self, name: str, role: str) -> list[str]:
        if name in self.blocking:
            return ["tests.fakes.blocking_node", str(self.directory / f"block-{name}"), role]
        if name in self.withholding:
            return ["tests.fakes.withholding_node", str(self.directory / f"withheld-{name}")]
        if name in self.punctual:
            return ["tests.fakes.punctual_node", str(self.directory / f"silences-{name}"), role]
        return ["deploy.movable_node" if name in self.movable_names else f"{role}_node"]

    def launch(self, name: str) -> None:
        role = name.rpartition("-")[0]
        module = (
            [*self.router_module, "--process", str(self.router_names.index(name))]
            if names_router(name)
            else [*self._node_module(name, role), "--name", name]
        )
        added = [part for row in self.rows for part in row]
        module = ["tests.fakes.with_rows", *added, "--", *module] if added else module
        with (self.directory / f"{name}.log").open("ab") as log:
            module += ["--cluster", str(self.file)]
            self.processes[name] = self.start(module, ROOT, ENV, log)

    def rank_pids(self, name: str) -> list[int]:
        """Return the process ids of a node's ranks 1 and up."""
        _, *children = with_children(Path(f"/proc/{self.processes[name].pid}"))
        names = {each: proc_text(each / "cmdline") + proc_text(each / "comm") for each in children}
        return [int(each.name) for each, name in names.items() if rank_forks.NAME in name]

    def listens_at(self, name: str) -> set[tuple[str, int]]:
        """Return (address, port) of every listening TCP socket of the process and its children."""
        return listening_sockets(Path(f"/proc/{self.processes[name].pid}"))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(PATIENCE)

    def __enter__(self) -> RunningCluster:
        """Start the cluster for a fixture, outside of an event loop."""
        return asyncio.run(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    async def __aenter__(self) -> RunningCluster:
        for name in self.names:
            if name not in self.late:
                self.launch(name)
        try:
            await self.wait_nodes()
        except BaseException as error:
            self.stop(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop, error)

    def stop(self, error: BaseException | None = None) -> None:
        """End every process; after an `error`, print the ends of their logs."""
        for held in self.held:
            held.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(2 * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE)
                if error is None:
                    raise AssertionError(f"{name} did not drain:\n{self.log(name)[-3000:]}") from None
        shutil.rmtree(self.run_dir, ignore_errors=True)  # left by killed processes
        if error is not None:
            for name in self.processes:
                print(f"---- {name}\n{self.log(name)[-3000:]}")

    async def wait_nodes(self, timeout: float = START_TIMEOUT, expect: Sequence[str] | None = None) -> None:
        """Wait until every node of `expect` (default: all that are not `late`) is registered and up."""
        wanted = set(expect if expect is not None else self.names[self.routers :])
        if expect is None:
            wanted -= set(self.late)
        deadline = time.monotonic() + timeout
        for router in self.router_names:
            if router not in self.late:
                await self._wait_at(router, wanted, deadline)

    async def _wait_at(self, router: str, wanted: set[str], deadline: float) -> None:
        async with self.operator() if self.routers == 1 else self.at(router) as client:
            while True:
                try:
                    info = await client.info()
                    if wanted <= {node["name"] for node in info["nodes"] if node["state"] == "up"}:
                        return
                except aiohttp.ClientError:
                    pass
                for name, process in self.processes.items():
                    if process.poll() is not None and name in {*self.router_names, *wanted}:
                        raise AssertionError(
                            f"{name} ended with {process.returncode}:\n{self.log(name)[-3000:]}"
                        )
                if time.monotonic() > deadline:
                    logs = "\n".join(f"---- {name}\n{self.log(name)[-2000:]}" for name in self.processes)
                    raise AssertionError(f"{router} does not have all of {wanted}\n{logs}")
                await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Answer:
    """A completed request."""

    tokens: list[str]
    text: str
    finish_reason: str
    usage: dict[str, Any]


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    """Return the JSON of an answer, which must have status 200."""
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


class Client:
    """One aiohttp session against one router."""

    def __init__(
        self,
        url: str,
        socket_path: Path | None = None,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a client. `socket_path`: the admin socket, for every request. `key`: an API key."""
        self._url = url
        self._socket = socket_path
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._tls = tls

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=1500)  # pytest's timeout comes first
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        self.session = aiohttp.ClientSession(
            self._url, timeout=timeout, connector=connector, headers=self._headers
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def complete(self, prompt: list[int] | str, max_tokens: int = 16, **fields: Any) -> Answer:
        """Complete a prompt with distinguishable tokens. Raises ClientResponseError with the message of the body."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "skip_special_tokens": False, **fields}
        async with self.session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {answer}")
        choice = answer["choices"][0]
        return Answer(choice["logprobs"]["tokens"], choice["text"], choice["finish_reason"], answer["usage"])

    async def complete_all(
        self, prompts: Sequence[list[int]], at_once: int, max_tokens: int = 16, **fields: Any
    ) -> list[Answer]:
        """Complete all prompts, at most `at_once` at a time; answers are in the order of the prompts."""
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                return await self.complete(prompt, max_tokens, **fields)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def info(self) -> dict[str, Any]:
        async with self.session.get("/server_info") as response:
            result: dict[str, Any] = await response.json()
            return result

    async def node(self, name: str) -> dict[str, Any]:
        """Wait until the router has the node, which it may lose for a while if this host stalls."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for node in (await self.info())["nodes"]:
                if node["name"] == name:
                    found: dict[str, Any] = node
                    return found
            assert time.monotonic() < deadline, f"the router does not have {name}"
            await asyncio.sleep(0.05)

    async def gone(self, name: str) -> None:
        """Wait until the router has lost the node."""
        deadline = time.monotonic() + PATIENCE
        while name in {node["name"] for node in (await self.info())["nodes"]}:
            assert time.monotonic() < deadline, f"{name} is still there"
            await asyncio.sleep(0.02)

    async def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Wait until every node is idle: free + cached = total and no quarantine. AssertionError means leaked pages.

        Afterwards counters are current: reports from before this call are ignored.
        """
        begun, deadline = time.time(), time.monotonic() + timeout
        while True:
            nodes = (await self.info())["nodes"]
            leaked = {
                node["name"]: (node["as_of"] - begun, load)
                for node in nodes
                for load in (node["load"],)
                if node["as_of"] <= begun
                or load["free_pages"] + load["cached_pages"] != load["total_pages"]
                or load["quarantined_pages"]
                or load["running"] + load["queued"] + load["transferring"]
            }
            if not leaked:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {timeout} s: {leaked}")
            await asyncio.sleep(0.05)
