"""The router's core without HTTP, with fake nodes on a real ipc socket."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import zmq

from common.ipc.channel import QUEUED_BYTES
from common.ipc.curve import Plain
from common.messages.decode_inbox import Reserve
from common.messages.generation import SamplingParams
from common.messages.identity import Role
from common.messages.node_inbox import Registered
from common.messages.prefill_inbox import Prefill
from common.observability.logs import Log
from router.core import assemble_core
from router.dispatch.answer_states import AnswerStates
from router.dispatch.generation import GenerationRequest, PromptBatch, TokenDelta
from router.dispatch.limits import DispatchLimits
from router.nodes.outbox import SendAll
from router.nodes.placement import PlacementPolicy, RoundRobin
from router.nodes.registration import ExpectedNode, RegistrationRules
from router.parts import ControlLink, Dispatching, NodeRules
from tests.fakes.clock import Clock
from tests.fakes.fake_node import PEER_ADDRESS, FakeNode
from tests.fakes.observing import observation
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.fakes.waiting import PATIENCE

FINGERPRINT = "f" * 64
VOCAB_SIZE = 50_000


class RouterRig:
    """The router's core; created by `router_rig`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], clock: Callable[[], float], **limits: Any
    ) -> None:
        self.context = context
        self.log = Log("router")
        self.directory = tempfile.mkdtemp(prefix="tandem-test-")
        # the cluster file, which grows with the nodes of the test
        self.expected: dict[str, ExpectedNode] = {}
        self.rooms: set[int] = set()
        # Sends one message of the dispatcher and returns whether the node was reached; a test may replace it.
        self.send: Callable[[str, msgspec.Struct], bool] = self._send
        queued_bytes = limits.pop("queued_bytes", QUEUED_BYTES)
        policies: dict[Role, PlacementPolicy] = limits.pop(
            "policies", {"prefill": RoundRobin(), "decode": RoundRobin()}
        )
        rules = limits.pop("rules", DEFAULT_RULES)
        nodes = NodeRules(
            RegistrationRules(self.expected, page_size=16, max_model_len=4096, vocab_size=VOCAB_SIZE),
            FINGERPRINT,
            limits.pop("configured", {}),
            node_timeout=3.0,
            loop_timeout=5.0,
            return_window=limits.pop("return_window", 60.0),
            slow_start=limits.pop("slow_start", 0.0),
        )
        values = {
            "max_attempts": 3,
            "max_requests": 100,
            "request_timeout": 600.0,
            "placement_wait": 0.5,
            "retry_ratio": 0.2,
            "queue_wait": 30.0,
            "max_crashes": 2,
            "reserved_tokens": 0,  # because its nodes are small
            "first_token_hold": 0.0,
            "requests_per_node": 1 << 20,
            **limits,
        }
        core = assemble_core(
            ControlLink(
                context, f"ipc://{self.directory}/control", "router-incarnation", Plain(), queued_bytes
            ),
            nodes,
            Dispatching(policies, DispatchLimits(**values), 0.0, Random(1), rules),
            observation(self.log, clock),
            self._recording,
        )
        self.control, self.registry = core.control, core.registry
        self.dispatcher, self.metrics = core.dispatcher, core.metrics
        self.orders = core.orders
        self.history, self.flush_caches = core.placer.history, core.flush_caches
        sweep = self.registry.sweep
        # Real stalls of this process must not count: the registry uses the test's clock.
        self.registry.sweep = lambda stalled=0.0: sweep()  # type: ignore[method-assign]
        self.nodes: list[FakeNode] = []
        core.start()

    def _recording(self, send_all: SendAll) -> SendAll:
        """Send through `self.send` once it was replaced, and note the rooms of messages."""
        self._to_node = send_all
        return self._send_all

    def _send(self, peer: str, message: msgspec.Struct) -> bool:
        return self._to_node(peer, [message]) == 1

    def _send_all(self, peer: str, messages: Sequence[msgspec.Struct]) -> int:
        self.rooms.update(getattr(message, "room", 0) for message in messages)
        if self.send == self._send:
            return self._to_node(peer, messages)
        for sent, message in enumerate(messages):
            if not self.send(peer, message):
                return sent
        return len(messages)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.control.close()
        shutil.rmtree(self.directory)

    def expect(self, role: Role, name: str) -> None:
        """Add a node to the cluster file."""
        self.expected[name] = ExpectedNode(role, PEER_ADDRESS if role == "prefill" else "", 1, None)

    def fake(self, role: Role, name: str, **options: Any) -> FakeNode:
        """Create a fake node that is not registered yet."""
        self.expect(role, name)
        node = FakeNode(self.context, self.control.address, role, name, **options)
        self.nodes.append(node)
        return node

    async def node(self, role: Role, name: str, **options: Any) -> FakeNode:
        node = self.fake(role, name, **options)
        assert isinstance(await node.register(), Registered)
        return node

    async def pair(self, number: int = 0) -> tuple[FakeNode, FakeNode]:
        return await self.node("prefill", f"prefill-{number}"), await self.node("decode", f"decode-{number}")

    def client(
        self,
        prompt: list[int] | None = None,
        batch: PromptBatch | None = None,
        states: AnswerStates | None = None,
        session: bytes = b"",
        streamed: bool = False,
        **sampling: Any,
    ) -> Client:
        params = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **sampling})
        ids = prompt or [1, 2, 3]
        asked = GenerationRequest(
            "r1",
            ids,
            params,
            streamed,
            session=session,
            batch=batch or PromptBatch(),
            states=states,
        )
        return Client(self.dispatcher.generate(asked))

    def nothing_left(self) -> None:
        assert self.dispatcher.active == 0
        assert not [room for room in self.rooms if self.dispatcher.attempt(room) is not None]
        assert not [node.rooms for node in self.registry if node.rooms]


class Client:
    """Reads a generation in a task of its own."""

    def __init__(self, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self.deltas: list[TokenDelta] = []
        self.error: BaseException | None = None
        self.task = asyncio.get_running_loop().create_task(self._read(deltas))

    @property
    def ids(self) -> list[int]:
        return [token.id for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    async def done(self, timeout: float = PATIENCE) -> Client:
        async with asyncio.timeout(timeout):
            await asyncio.shield(asyncio.gather(self.task, return_exceptions=True))
        return self

    async def until(self, count: int, timeout: float = PATIENCE) -> None:
        """Wait until `count` tokens have arrived."""
        async with asyncio.timeout(timeout):
            while len(self.ids) < count:
                await asyncio.sleep(0.001)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _read(self, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        try:
            async for delta in deltas:
                self.deltas.append(delta)
        except Exception as error:
            self.error = error
        finally:
            await deltas.aclose()


@asynccontextmanager
async def router_rig(
    clock: Callable[[], float] | None = None, **limits: Any
) -> AsyncGenerator[RouterRig, None]:
    """Build a rig. `clock` is the registry's; by default it stands still, so that no heartbeats are needed."""
    context = zmq.Context[zmq.Socket[bytes]]()
    rig = RouterRig(context, clock or Clock(), **limits)
    try:
        yield rig
    finally:
        rig.close()
        await asyncio.sleep(0)
        context.term()


async def legs(prefill: FakeNode, decode: FakeNode) -> tuple[Reserve, Prefill]:
    """Receive the two halves of the next request and check that they agree."""
    reserve, prompt = await decode.expect(Reserve), await prefill.expect(Prefill)
    assert (reserve.room, reserve.token_ids, reserve.emitted) == (
        prompt.room,
        prompt.token_ids,
        prompt.emitted,
    )
    assert (reserve.prefill, prompt.decode) == (prefill.ref, decode.ref.incarnation)
    return reserve, prompt


async def legs_after_losses(prefill: FakeNode, decode: FakeNode) -> tuple[Reserve, Prefill]:
    """Receive the halves of the attempt that both nodes have. Attempts before it may name a node that was lost next."""
    while (reserve := await decode.expect(Reserve)).prefill != prefill.ref:
        pass
    while (prompt := await prefill.expect(Prefill)).decode != decode.ref.incarnation:
        pass
    assert reserve.room == prompt.room
    return reserve, prompt
