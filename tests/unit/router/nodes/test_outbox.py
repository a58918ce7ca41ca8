"""Messages of one turn leave together, in order, and not after their request has been given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from common.messages.node_inbox import Abort
from router.nodes import outbox
from router.nodes.outbox import Outbox, Parcel
from router.nodes.registry import Node
from tests.fakes.waiting import eventually
from tests.unit.router.dispatch.test_attempt import node

PREFILL, DECODE = node("prefill"), node("decode")


class Sent:
    """Records the rooms of messages that are sent together; nodes in `gone` cannot be reached."""

    def __init__(self) -> None:
        self.rooms: list[list[int]] = []
        self.gone: set[str] = set()
        self.room_for = 100  # messages in one call, as if the next frame could not be sent
        self.broken: set[int] = set()  # rooms whose messages cannot be encoded

    def __call__(self, peer: str, messages: Sequence[msgspec.Struct]) -> int:
        rooms = [each.room for each in messages if isinstance(each, Abort)]
        if self.broken & set(rooms):
            raise ValueError(f"rooms {rooms}")
        if peer in self.gone:
            return 0
        self.rooms.append(rooms[: self.room_for])
        return len(self.rooms[-1])


class Outcome:
    """What became of a parcel."""

    def __init__(self, box: Outbox, *messages: tuple[str, Node, Abort]) -> None:
        self.sent = False
        self.reason: Node | Exception | None = None
        self.parcel = Parcel(messages, self._unsent, self._all_sent)
        box.put(self.parcel)

    def _all_sent(self) -> None:
        self.sent = True

    def _unsent(self, reason: Node | Exception) -> None:
        self.reason = reason


def message(room: int, to: Node = DECODE) -> tuple[str, Node, Abort]:
    return to.routing_id, to, Abort(room=room, reason="x")


async def test_the_messages_of_a_turn_for_one_node_leave_together() -> None:
    sent = Sent()
    box = Outbox(sent)
    first = Outcome(box, message(1), message(2, PREFILL))
    box.post(DECODE, Abort(room=3, reason="x"))
    second = Outcome(box, message(4), message(5, PREFILL))
    assert not sent.rooms, "the turn goes on"
    await asyncio.sleep(0)
    assert sent.rooms == [[1, 3, 4], [2, 5]]
    assert [(each.sent, each.reason) for each in (first, second)] == [(True, None)] * 2
    third = Outcome(box, message(6))
    await asyncio.sleep(0)
    assert third.sent
    assert sent.rooms[2:] == [[6]]


async def test_nothing_follows_a_message_that_cannot_be_sent() -> None:
    sent = Sent()
    sent.gone.add(DECODE.routing_id)
    box = Outbox(sent)
    outcome = Outcome(box, message(1), message(2, PREFILL))
    other = Outcome(box, message(3, PREFILL))
    await asyncio.sleep(0)
    assert outcome.reason is DECODE
    assert not outcome.sent
    assert other.sent
    assert sent.rooms == [[3]]


async def test_messages_that_no_longer_fit_fail_alone() -> None:
    sent = Sent()
    sent.room_for = 2
    box = Outbox(sent)
    outcomes = [Outcome(box, message(room)) for room in (1, 2, 3)]
    await asyncio.sleep(0)
    assert [each.sent for each in outcomes] == [True, True, False]
    assert outcomes[2].reason is DECODE


async def test_a_request_that_is_given_up_in_the_same_turn_sends_nothing() -> None:
    sent = Sent()
    box = Outbox(sent)
    given_up = Outcome(box, message(1), message(2, PREFILL))
    assert given_up.parcel.cancel()
    box.post(DECODE, Abort(room=3, reason="x"))
    await asyncio.sleep(0)
    assert sent.rooms == [[3]]
    assert not given_up.sent
    late = Outcome(box, message(4))
    await asyncio.sleep(0)
    assert not late.parcel.cancel(), "it was sent"


async def test_a_message_that_cannot_be_encoded_holds_up_no_other() -> None:
    """The request that it belongs to gets the error; what nobody waits for is reported to the loop."""
    sent, reported = Sent(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    sent.broken = {1, 3}
    box = Outbox(sent)
    first = Outcome(box, message(1), message(2))
    box.post(DECODE, Abort(room=3, reason="x"))
    last = Outcome(box, message(4))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match=r"rooms \[1\]"):
        raise first.reason if isinstance(first.reason, Exception) else AssertionError
    assert last.sent
    assert sent.rooms == [[4]]
    assert [str(each["exception"]) for each in reported] == ["rooms [3]"]


async def test_what_is_posted_leaves_once_the_node_can_be_reached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that breaks for a moment must not let a request run on that its client has given up."""
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.0)
    sent = Sent()
    box = Outbox(sent)
    sent.gone = {DECODE.routing_id}
    box.post(DECODE, Abort(room=1, reason="x"))
    box.post(PREFILL, Abort(room=2, reason="x"))
    await eventually(lambda: sent.rooms == [[2]])
    sent.gone.clear()
    await eventually(lambda: sent.rooms == [[2], [1]])


async def test_nothing_is_posted_to_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.0)
    sent, lost = Sent(), node("decode")
    box = Outbox(sent)
    sent.gone = {lost.routing_id}
    box.post(lost, Abort(room=1, reason="x"))
    for _ in range(5):
        await asyncio.sleep(0)
    lost.lost_by = "silent"
    for _ in range(5):
        await asyncio.sleep(0)
    sent.gone.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert sent.rooms == []
