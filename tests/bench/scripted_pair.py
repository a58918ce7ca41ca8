"""A prefill and a decode node in the caller's process that use the real messages and answer requests at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from common.checkpoint.model_config import model_fingerprint
from common.messages.decode_inbox import Reserve
from common.messages.generation import FINISH_LENGTH, OutputToken, TokenLogprob
from common.messages.identity import ROUTER_NAME, NodeLoad
from common.messages.node_inbox import Abort, Registered
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FirstToken, PrefillDone, TokenRun, Tokens
from tests.cluster.harness import MODEL
from tests.fakes.fake_node import FakeNode

STEP_SECONDS = 0.002
BEAT_SECONDS = 0.25  # as by default
TEND_SECONDS = 0.05  # between two looks for acknowledgements that are due
PAGE_SIZE = 16
TOKEN = 260
FIRST_LISTED = 300  # first of the top tokens


class RouterPlace(Protocol):
    """The routers of a cluster. RunningCluster implements it."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def processes(self) -> Mapping[str, Any]:
        """The processes by name, each with its `pid`."""
        ...


class ScriptedNode(FakeNode):
    """A FakeNode that calls a function with each message as soon as it arrives, and stores none."""

    def serve(self, handle: Callable[[msgspec.Struct], None]) -> None:
        """Begin to serve on the running event loop, until `close`."""
        self._handle = handle
        self._serving = True
        asyncio.get_running_loop().add_reader(self.dealer.fileno(), self.look)
        self.look()

    def look(self) -> None:
        """Handle all messages. Call it after sending, too, which may consume the edge of the descriptor."""
        while messages := self.received():
            self.unread.clear()
            for message in messages:
                self._handle(message)

    def close(self) -> None:
        if self._serving:
            asyncio.get_running_loop().remove_reader(self.dealer.fileno())
        super().close()

    _serving = False


@dataclass
class _Running:
    """A request on the decode node."""

    token: OutputToken | None  # None: that of the step
    offset: int  # offset of its next token
    end: int


class ScriptedPair:
    """Answers each request with as many tokens as it asks for. Use it as an async context.

    The prefill node sends the first token at once; the decode node sends `tokens_per_step` per request and step.
    """

    def __init__(
        self,
        cluster: RouterPlace,
        pool_tokens: tuple[int, int],
        max_model_len: int,
        step_seconds: float = STEP_SECONDS,
        tokens_per_step: int = 1,
        number: int = 0,
        ids: Sequence[int] = (TOKEN,),
        router: str = ROUTER_NAME,
    ) -> None:
        """`pool_tokens` of the prefill and the decode node. The cluster's own nodes are not started.

        `number` ends the nodes' names, and `router` is the process that they serve. The tokens of a step without
        logprobs have the next of `ids`.
        """
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._pages = [tokens // PAGE_SIZE for tokens in pool_tokens]
        self._common: dict[str, Any] = {
            "fingerprint": model_fingerprint(MODEL),
            "max_model_len": max_model_len,
        }
        self.step_seconds = step_seconds
        self.tokens_per_step = tokens_per_step
        self._running: dict[int, _Running] = {}  # room -> request
        self._woken = asyncio.Event()  # there is a request to be decoded
        self._number = number
        self._ids = itertools.cycle(ids)
        self.sent: dict[int, float] = {}  # token id -> time of the latest step with it
        self.router_pid = cluster.processes[router].pid
        self.address = f"ipc://{cluster.run_dir}/{router}.sock"
        peers = f"ipc://{cluster.run_dir}/prefill-{number}.sock"
        self.prefill = ScriptedNode(
            *(self._context, self.address, "prefill", f"prefill-{number}"),
            peer_address=peers,
            total_pages=self._pages[0],
            **self._common,
        )
        self.decode = self._decode_node()
        self._tasks: list[asyncio.Task[None]] = []

    def _decode_node(self) -> ScriptedNode:
        return ScriptedNode(
            *(self._context, self.address, "decode", f"decode-{self._number}"),
            total_pages=self._pages[1],
            **self._common,
        )

    async def __aenter__(self) -> ScriptedPair:
        for node in (self.prefill, self.decode):
            answer = await node.register()
            assert isinstance(answer, Registered), answer
        self.prefill.serve(self._on_prefill)
        self.decode.serve(self._on_decode)
        self._tasks = [asyncio.create_task(each) for each in (self._steps(), self._beat(), self._tend())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.prefill.close()
        self.decode.close()
        self._context.destroy(linger=0)

    @property
    def running(self) -> int:
        """Return the number of requests on the decode node."""
        return len(self._running)

    async def replace_decode(self) -> None:
        """End the decode node and register a new process under its name."""
        self._running.clear()
        # The router does not answer a second process under a name while the first one lives.
        self.decode.close()
        self.decode = self._decode_node()
        answer = await self.decode.register()
        assert isinstance(answer, Registered), answer
        self.decode.serve(self._on_decode)

    def _on_prefill(self, message: msgspec.Struct) -> None:
        if isinstance(message, Prefill):
            token = _token(message.sampling.logprobs)
            finish = FINISH_LENGTH if message.sampling.max_tokens - message.emitted == 1 else None
            self.prefill.say(
                FirstToken(room=message.room, token=token, finish_reason=finish, cached_tokens=0),
                PrefillDone(room=message.room, stages={"computed": 0.001}),
            )

    def _on_decode(self, message: msgspec.Struct) -> None:
        if isinstance(message, Reserve) and message.sampling.max_tokens - message.emitted > 1:
            logprobs = message.sampling.logprobs
            token = None if logprobs is None else _token(logprobs)
            end = message.sampling.max_tokens - message.emitted
            self._running[message.room] = _Running(token, 1, end)
            self._woken.set()
        elif isinstance(message, Abort):
            self._running.pop(message.room, None)

    async def _steps(self) -> None:
        while True:
            self._woken.clear()
            if self._running:
                self.decode.say(Tokens(runs=self._step()))
                self.decode.look()
                await asyncio.sleep(self.step_seconds)
            else:
                await self._woken.wait()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_SECONDS)
            for node in (self.prefill, self.decode):
                node.look()

    def _step(self) -> list[TokenRun]:
        runs = []
        stepped = OutputToken(next(self._ids))
        self.sent[stepped.id] = time.perf_counter()
        for room, request in list(self._running.items()):
            count = min(self.tokens_per_step, request.end - request.offset)
            over = request.offset + count == request.end
            finish, stages = (FINISH_LENGTH, {"decoded": 0.002}) if over else (None, None)
            runs.append(TokenRun(room, request.offset, [request.token or stepped] * count, finish, stages))
            request.offset += count
            if over:
                del self._running[room]
        return runs

    async def _beat(self) -> None:
        while True:
            for node, pages in zip((self.prefill, self.decode), self._pages, strict=True):
                node.beat(load=NodeLoad(total_pages=pages, free_pages=pages))
                node.beats.drain()
            await asyncio.sleep(BEAT_SECONDS)


def _token(logprobs: int | None) -> OutputToken:
    if logprobs is None:
        return OutputToken(TOKEN)
    listed = range(logprobs)
    values = tuple(-1.0 - 0.125 * each for each in listed)
    return OutputToken(TOKEN, TokenLogprob(-1.0, tuple(FIRST_LISTED + each for each in listed), values))
