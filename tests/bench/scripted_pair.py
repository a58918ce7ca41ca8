"""A prefill and a decode node in the caller's process that speak the real messages and answer requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import zmq

from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken
from common.messages.identity import NodeLoad
from common.messages.node_inbox import Registered
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FirstToken, PrefillDone
from common.model_config import model_fingerprint
from tests.cluster.harness import MODEL, RunningCluster
from tests.fakes.fake_node import FakeNode

TURN_SECONDS = 0.002
BEAT_SECONDS = 0.5
PAGE_SIZE = 16


class ScriptedNode(FakeNode):
    """A FakeNode that keeps nothing."""

    def take(self) -> Sequence[msgspec.Struct]:
        """The messages that have come since the last call."""
        messages = self.received()
        self._got.clear()
        return messages


class ScriptedPair:
    """Answers each request with two tokens, of which the decode node says the second. Use as an async context."""

    def __init__(self, cluster: RunningCluster, pool_tokens: tuple[int, int], max_model_len: int) -> None:
        """`pool_tokens` of the prefill and of the decode node. The cluster's nodes are not started."""
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._pages = [tokens // PAGE_SIZE for tokens in pool_tokens]
        common = {"fingerprint": model_fingerprint(MODEL), "max_model_len": max_model_len}
        self.address = f"ipc://{cluster.run_dir}/router.sock"
        peers = f"ipc://{cluster.run_dir}/prefill-0.sock"
        self.prefill = ScriptedNode(
            *(self._context, self.address, "prefill", "prefill-0"),
            peer_address=peers,
            total_pages=self._pages[0],
            **common,
        )
        self.decode = ScriptedNode(
            *(self._context, self.address, "decode", "decode-0"), total_pages=self._pages[1], **common
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ScriptedPair:
        for node in (self.prefill, self.decode):
            answer = await node.register()
            assert isinstance(answer, Registered), answer
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.prefill.close()
        self.decode.close()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            for message in self.prefill.take():
                if isinstance(message, Prefill):
                    first = FirstToken(
                        room=message.room, token=OutputToken(260), finish_reason=None, cached_tokens=0
                    )
                    self.prefill.say(first, PrefillDone(room=message.room, stages={"computed": 0.001}))
            for message in self.decode.take():
                if isinstance(message, Reserve):
                    self.decode.tokens(message.room, 1, [261], "length", decoded=0.002)
            await asyncio.sleep(TURN_SECONDS)

    async def _beat(self) -> None:
        while True:
            for node, pages in zip((self.prefill, self.decode), self._pages, strict=True):
                node.beat(load=NodeLoad(total_pages=pages, free_pages=pages))
                node._beats.drain()
            await asyncio.sleep(BEAT_SECONDS)
