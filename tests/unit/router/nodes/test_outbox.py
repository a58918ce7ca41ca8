"""Messages of one turn leave together, in order, and not after their request has been given up."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from common.messages.node_inbox import Abort
from router.nodes.outbox import Outbox
from router.nodes.registry import Node
from tests.unit.router.dispatch.test_attempt import node

PREFILL, DECODE = node("prefill"), node("decode")


class Sent:
    """Records messages; nodes in `gone` cannot be reached."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.gone: set[str] = set()

    def __call__(self, peer: str, message: msgspec.Struct) -> bool:
        assert isinstance(message, Abort)
        self.rooms.append(message.room)
        return peer not in self.gone


def message(room: int, to: Node = DECODE) -> tuple[str, Node, Abort]:
    return to.routing_id, to, Abort(room=room, reason="x")


async def test_everything_of_a_turn_leaves_in_order() -> None:
    sent = Sent()
    box = Outbox(sent)
    first = box.put([message(1), message(2, PREFILL)])
    box.post(DECODE, Abort(room=3, reason="x"))
    second = box.put([message(4)])
    assert not sent.rooms, "the turn goes on"
    assert await asyncio.gather(first, second) == [None, None]
    assert sent.rooms == [1, 2, 3, 4]


async def test_nothing_follows_a_message_that_cannot_be_sent() -> None:
    sent = Sent()
    sent.gone.add(DECODE.routing_id)
    box = Outbox(sent)
    assert await box.put([message(1), message(2, PREFILL)]) is DECODE
    assert sent.rooms == [1]


async def test_a_request_that_is_given_up_in_the_same_turn_sends_nothing() -> None:
    sent = Sent()
    box = Outbox(sent)

    async def place() -> None:
        await box.put([message(1), message(2, PREFILL)])

    placing = asyncio.create_task(place())
    await asyncio.sleep(0)
    placing.cancel()
    box.post(DECODE, Abort(room=3, reason="x"))
    with pytest.raises(asyncio.CancelledError):
        await placing
    await asyncio.sleep(0)
    assert sent.rooms == [3]


async def test_a_message_that_raises_holds_up_no_other() -> None:
    """The request that it belongs to gets the error; what nobody waits for is reported to the loop."""
    sent, reported = Sent(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def send(peer: str, each: msgspec.Struct) -> bool:
        assert isinstance(each, Abort)
        if each.room in (1, 3):
            raise ValueError(f"room {each.room}")
        return sent(peer, each)

    box = Outbox(send)
    first = box.put([message(1), message(2)])
    box.post(DECODE, Abort(room=3, reason="x"))
    last = box.put([message(4)])
    with pytest.raises(ValueError, match="room 1"):
        await first
    assert await last is None
    assert sent.rooms == [4]
    assert [str(each["exception"]) for each in reported] == ["room 3"]
