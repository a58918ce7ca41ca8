"""A node as the router sees it: real messages over a real socket, scripted by the test."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any, TypeVar

import msgspec
import zmq

from common.ipc import Dealer
from common.messages import decode_inbox, prefill_inbox
from common.messages.generation import OutputToken
from common.messages.identity import NodeCounters, NodeLoad, NodeRef, NodeState, Role, new_incarnation
from common.messages.node_inbox import HeartbeatAck, Registered, Rejected
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from common.messages.router_inbox import Heartbeat, Register, TokenRun, Tokens
from common.messages.wire import encode
from tests.fakes.waiting import PATIENCE

M = TypeVar("M", bound=msgspec.Struct)
PEER_ADDRESS = "ipc:///nowhere"  # address of every prefill node, to which nothing connects


def registration(
    role: Role,
    name: str,
    fingerprint: str = "f" * 64,
    page_size: int = 16,
    max_model_len: int = 4096,
    incarnation: str | None = None,
    peer_address: str = PEER_ADDRESS,
    total_pages: int = 100,
    link_secret: str = "",
    protocol_version: int = CONTROL_PROTOCOL_VERSION,
) -> Register:
    """Return the first message of a node. Its incarnation names its socket, so two sockets must never share one."""
    return Register(
        protocol_version=protocol_version,
        node=NodeRef(
            name=name,
            role=role,
            incarnation=incarnation or new_incarnation(),
            peer_address=peer_address if role == "prefill" else "",
        ),
        link_secret=link_secret,
        host="host",
        pid=1,
        model_fingerprint=fingerprint,
        max_model_len=max_model_len,
        page_size=page_size,
        total_pages=total_pages,
        effective_config={},
    )


class FakeNode:
    """A scripted node. `expect` waits for the next message of a type and keeps the others for later."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, role: Role, name: str, **options: Any
    ) -> None:
        """`options`: arguments of `registration`."""
        self.record = registration(role, name, **options)
        self.ref = self.record.node
        self.link_id = self.record.link_id()
        self.dealer = Dealer(context, address, self.record.link_id().encode())
        self.beats = Dealer(context, address, self.record.link_id("beat").encode(), opens=False)
        self._codec = prefill_inbox.codec if role == "prefill" else decode_inbox.codec
        self.unread: deque[msgspec.Struct] = deque()
        self._sequence = 0

    def say(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            assert self.dealer.send(encode(message))

    def say_raw(self, frame: bytes) -> None:
        assert self.dealer.send(frame)

    def ask(self) -> None:
        """Send one registration."""
        self.say(self.record)

    async def register(self) -> Registered | Rejected:
        """Register as a node does: repeat until the router answers."""
        answer: msgspec.Struct | None = None
        while answer is None:
            self.ask()
            with contextlib.suppress(TimeoutError):
                answer = await self.expect((Registered, Rejected), 0.5)
        assert isinstance(answer, Registered | Rejected)
        return answer

    def beat(
        self,
        state: NodeState = "up",
        loop_age_ms: int = 0,
        load: NodeLoad | None = None,
        incarnation: str = "",
    ) -> None:
        self._sequence += 1
        self.beats.datagram(
            encode(
                Heartbeat(
                    incarnation=incarnation or self.ref.incarnation,
                    sequence=self._sequence,
                    state=state,
                    loop_age_ms=loop_age_ms,
                    as_of=time.time(),
                    load=load or NodeLoad(total_pages=100, free_pages=100),
                    counters=NodeCounters(),
                )
            )
        )

    def tokens(
        self, room: int, offset: int, ids: list[int], finish: str | None = None, **stages: float
    ) -> None:
        run = TokenRun(room, offset, [OutputToken(i) for i in ids], finish, stages or None)
        self.say(Tokens(runs=[run]))

    async def expect(self, kind: type[M] | tuple[type[M], ...], timeout: float = PATIENCE) -> M:
        async with asyncio.timeout(timeout):
            while True:
                for message in self.received():
                    if isinstance(message, kind):
                        self.unread.remove(message)
                        return message
                await asyncio.sleep(0.001)

    async def echo(self, timeout: float = PATIENCE) -> HeartbeatAck:
        """Send a heartbeat and return the router's answer."""
        async with asyncio.timeout(timeout):
            while not (frames := self.beats.drain()):
                await asyncio.sleep(0.001)
        answer = self._codec.decode(frames[-1])
        assert isinstance(answer, HeartbeatAck)
        return answer

    def received(self) -> list[msgspec.Struct]:
        """Return all messages that have arrived and were not expected yet."""
        self.unread.extend(self._codec.decode(frame) for frame in self.dealer.drain())
        return list(self.unread)

    async def silence(
        self, kind: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...], seconds: float = 0.03
    ) -> bool:
        """Return True if no message of this type arrives within `seconds`."""
        await asyncio.sleep(seconds)
        return not any(isinstance(message, kind) for message in self.received())

    def close(self) -> None:
        self.dealer.close()
        self.beats.close()
