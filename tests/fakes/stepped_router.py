"""A whole router in one process and in no time: its clients, nodes and child processes act when a test lets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

from aiohttp import web

from common.config import load_cluster
from common.config.router_processes import RouterProcess
from common.messages.identity import Role
from common.messages.image_inbox import LINK as IMAGES
from common.messages.router_inbox import Register
from common.observability.logs import Log
from router import control_plane
from router.app import RouterApp
from router.build import build
from router.dispatch.generation import GenerationRequest
from router.dispatch.limits import DispatchLimits
from router.parts import Observation
from router.process.freed_memory import FreedMemory
from tests.fakes import scripted_cluster
from tests.fakes.child_stand_ins import StandInSpawner
from tests.fakes.counted_loop import CountedLoop
from tests.fakes.fake_node import registration
from tests.fakes.memory_connection import MemoryTransport
from tests.fakes.memory_router_socket import MemoryRouterSocket
from tests.fakes.scripted_cluster import AskedPrompt, ScriptedCluster, SteppedNode

T = TypeVar("T")
MODELS = Path(__file__).parents[2] / "deploy/tiny_models"
PAIRS = 2  # of nodes
PAUSE = 5  # callbacks between two pieces of a request
LENGTH = 6  # tokens of an answer, unless its request allows fewer


class SteppedRouter(ScriptedCluster):
    """A router that `build` has made from a cluster file and that has started, with PAIRS pairs of nodes."""

    def __init__(
        self, directory: Path, model: str = "tiny-target", router: str = "", decode: str = ""
    ) -> None:
        """`router` and `decode`: further keys of these sections of the cluster file, in YAML's flow style."""
        prefills, decodes = (
            ", ".join(f"{{name: {role}-{number}}}" for number in range(PAIRS))
            for role in ("prefill", "decode")
        )
        self._file = directory / "cluster.yaml"
        self._file.write_text(
            f"model: {{path: {MODELS / model}, served_name: tiny, max_model_len: 1024}}\n"
            f"router: {{port: 0, control_address: 'ipc://{directory}/c', placement_wait: 0.5, {router}}}\n"
            f"health: {{drain_timeout: 5.0}}\nprocess: {{run_dir: {directory}/run}}\n"
            f"prefill: {{nodes: [{prefills}]}}\ndecode: {{nodes: [{decodes}], {decode}}}\n"
        )
        self.app: RouterApp
        self.spawner = StandInSpawner()
        self._patches = ExitStack()
        super().__init__(CountedLoop(), cast(DispatchLimits, None), {})
        self.start_missing()

    def __post_init__(self) -> None:
        """Build and start the router, in place of the part of one that a ScriptedCluster composes."""
        self.socket = MemoryRouterSocket(self.loop)
        for patch in (
            mock.patch.object(control_plane, "RouterSocket", return_value=self.socket),
            mock.patch("router.build.Spawner", return_value=self.spawner),
            mock.patch("router.build.model_fingerprint", return_value="f" * 64),
            mock.patch("router.build.Observation", partial(Observation, clock=self.loop.time)),
            mock.patch("router.images.inspector.processor_seconds", return_value=0.0),
            # Tokens of the small vocabulary.
            mock.patch.object(scripted_cluster, "token_at", lambda request, position: 300 + position % 200),
            mock.patch.object(FreedMemory, "give_back", mock.AsyncMock()),
            mock.patch("time.monotonic", self.loop.time),
        ):
            self._patches.enter_context(patch)

        async def start() -> None:
            self.app = build(load_cluster(self._file, []), RouterProcess(0, ()), Log("router"))
            self.core = self.app.core
            generate = self.core.dispatcher.generate

            def known(request: GenerationRequest, *rest: Any) -> Any:
                length = min(LENGTH, request.sampling.max_tokens)
                self.asked[request.request_id] = AskedPrompt(request, length)
                return generate(request, *rest)

            self.core.dispatcher.generate = known  # type: ignore[assignment,method-assign]
            await self.app.start()

        self.run(start())

    @property
    def counted(self) -> CountedLoop:
        """Its event loop."""
        assert isinstance(self.loop, CountedLoop)
        return self.loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for no timer."""
        task = self.loop.create_task(coroutine)
        self.loop.run_for()
        return task.result()

    def close(self) -> None:
        """Close the router, unless it has drained, and its event loop."""
        if self.socket.peers:
            self.loop.create_task(self.app.close())
            self.loop.run_for(30.0)
        self._patches.close()
        self.loop.close()

    # ---- clients

    def connect(self) -> MemoryClient:
        client = MemoryClient(self.counted)
        self.loop.run_now(partial(client.connect, self.app.http.public))
        return client

    def wait(self, over: Callable[[], bool]) -> None:
        """Let nodes work and time pass until `over`."""
        for turn in range(200):
            self.work()
            if over():
                return
            self.pass_time(0.05 if turn < 50 else 0.5)
        raise AssertionError("it does not end")

    # ---- nodes

    def registration(self, role: Role, name: str) -> Register:
        rules = self.core.control.rules
        expected = rules.nodes[name]
        return registration(
            role,
            name,
            page_size=rules.page_size,
            max_model_len=rules.max_model_len,
            peer_address=expected.peer_address,
            total_pages=expected.pages or 1000,
        )

    def start(self, role: Role, name: str) -> SteppedNode:
        node = super().start(role, name)
        # It takes images on a link of their own.
        images = node.record.link_id(IMAGES).encode()
        self.socket.peers[images] = lambda payload: not node.closed
        return node

    def start_missing(self) -> None:
        """Start the nodes that do not run."""
        running = {node.record.node.name for node in self.nodes}
        for number in range(PAIRS):
            for role in ("prefill", "decode"):
                if (name := f"{role}-{number}") not in running:
                    self.start(role, name)
        self.pass_time(0.5)

    def lose(self, role: Role) -> None:
        """Let the first node of this role that has requests die. May be called in a callback of the loop."""
        for node in self.nodes:
            if node.role == role and (node.jobs or node.incoming):
                node.alive, node.closed = False, True
                node.jobs.clear()
                self.nodes.remove(node)
                self.socket.closed()
                return

    def work(self, tokens: int = 2) -> None:
        """Let every node make progress with all of its requests."""
        for node in list(self.nodes):
            node.read()
            for job in list(node.jobs.values()):
                node.work(job, tokens)
            node.deliver()


class MemoryClient:
    """A client with one connection. Attribute `received`: all bytes from the router."""

    def __init__(self, loop: CountedLoop) -> None:
        self.received = b""
        self._loop = loop
        self._left = False
        self._transport: MemoryTransport

    def connect(self, runner: web.AppRunner) -> None:
        assert runner.server is not None
        self._transport = MemoryTransport(runner.server(), self._take)

    def slow_down(self) -> None:
        """Read slowly from now on."""
        self._transport.slow = True

    def _take(self, data: bytes) -> None:
        self.received += data

    def post(self, path: str, body: object, pieces: int = 1) -> None:
        """Let a request arrive: its head, and its body in some pieces, with a few callbacks between them."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        size = -(-len(raw) // pieces)
        self._loop.call_soon(
            self._arrive, [head.encode(), *(raw[at : at + size] for at in range(0, len(raw), size))]
        )

    def _arrive(self, pieces: list[bytes], callbacks: int = 0) -> None:
        if callbacks:
            self._loop.call_soon(self._arrive, pieces, callbacks - 1)
        else:
            self._transport.receive(pieces.pop(0))
            if pieces:
                self._loop.call_soon(self._arrive, pieces, PAUSE)

    def leave(self) -> None:
        """Disconnect. May be called in a callback of the loop."""
        self._left = True
        self._transport.lose()

    @property
    def status(self) -> int:
        """The status of the answer; 0 while there is none."""
        return int(self.received.split(b" ", 2)[1]) if self.received else 0

    @property
    def over(self) -> bool:
        """Whether the answer is complete or the connection has ended."""
        return self._left or self._transport.lost or self._complete()

    def _complete(self) -> bool:
        head, _, body = self.received.partition(b"\r\n\r\n")
        if b"Transfer-Encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        _, found, length = head.partition(b"Content-Length: ")
        return bool(found) and len(body) >= int(length.split(b"\r\n")[0])
