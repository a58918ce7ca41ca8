"""The first token of a stream is kept back until its time is over or its request goes on, and never for longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from common.errors import NodeLost, RequestError, Unavailable
from common.messages.decode_inbox import Reserve
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import Failed, Goodbye, PrefillDone
from router.dispatch.attempt import Attempt
from router.dispatch.first_token_hold import FirstTokenHold
from tests.fakes.clock import Clock
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import Client, RouterRig, legs, router_rig
from tests.fakes.waiting import eventually
from tests.unit.router.answers.test_direct_stream import asked, first
from tests.unit.router.conftest import Serve
from tests.unit.router.dispatch.test_attempt import attempt, ids, run
from tests.unit.router.dispatch.test_attempt import first as first_token
from tests.unit.router.routes.test_openai_disconnect import connect, leave

LONG = 1234.5  # seconds: what leaves earlier was not waiting for its timer


class Timer:
    """One timer of `Timers`."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.pending = True

    def cancel(self) -> None:
        self.pending = False


class Timers:
    """The timers of an event loop whose clock the test advances."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.all: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.all.append(Timer(self.clock() + delay, callback))
        return self.all[-1]

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        for timer in self.all:
            if timer.pending and timer.due <= self.clock():
                timer.pending = False
                timer.callback()

    @property
    def pending(self) -> int:
        return sum(timer.pending for timer in self.all)


def held_attempt(timers: Timers) -> Attempt:
    made = attempt()
    made.hold = FirstTokenHold(0.01, timers.call_later)
    return made


def test_by_default_the_first_token_leaves_at_once() -> None:
    made = attempt()
    made.on_first_token(first_token(10))
    assert made.woken.is_set


def test_it_leaves_when_its_time_is_over() -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_first_token(first_token(10))
    timers.advance(0.009)
    assert not made.woken.is_set
    timers.advance(0.002)
    assert made.woken.is_set
    assert (ids(made), made.finish_reason, timers.pending) == ([10], None, 0)
    made.on_run(run(1, [11]))
    assert made.woken.is_set
    assert (ids(made), len(timers.all)) == ([11], 1)


def test_it_leaves_with_the_next_tokens_in_order() -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_first_token(first_token(10))
    made.on_run(run(1, [11, 12]))
    assert made.woken.is_set
    assert (ids(made), timers.pending) == ([10, 11, 12], 0)


def test_it_leaves_with_the_error_that_ends_its_attempt() -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_first_token(first_token(10))
    made.fail(NodeLost("gone"))
    assert made.woken.is_set
    assert (ids(made), timers.pending) == ([10], 0)
    assert isinstance(made.error, NodeLost)


@pytest.mark.parametrize("early", [1, 2])
def test_it_is_not_held_once_the_decode_node_has_sent_tokens(early: int) -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_run(run(early, [10 + early]))
    made.on_first_token(first_token(10))
    assert made.woken.is_set
    assert (ids(made), timers.all) == ([10, 11] if early == 1 else [10], [])


def test_it_is_not_held_if_it_is_the_last_one() -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_first_token(first_token(10, "length"))
    assert made.woken.is_set
    assert (ids(made), timers.all) == ([10], [])


@pytest.mark.parametrize("when", ["held", "released"])
def test_a_repeated_first_token_starts_no_second_hold(when: str) -> None:
    timers = Timers()
    made = held_attempt(timers)
    made.on_first_token(first_token(10))
    if when == "released":
        timers.advance(1)
    made.on_first_token(first_token(10))
    assert made.woken.is_set
    assert (ids(made), len(timers.all), timers.pending) == ([10], 1, 0)


# -- with the dispatcher and nodes ---------------------------------------------------------------------------------


@pytest.fixture
async def long_timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """All timers of LONG seconds that the event loop starts."""
    loop, found = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def noted(
        delay: float, callback: Callable[..., object], *args: Any, **options: Any
    ) -> asyncio.TimerHandle:
        timer = call_later(delay, callback, *args, **options)
        if delay == LONG:
            found.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", noted)
    return found


async def held(rig: RouterRig) -> tuple[Client, FakeNode, FakeNode, int]:
    """Start a stream whose first token, 50, is held while its pages are handed over."""
    prefill, decode = await rig.pair()
    client = rig.client([1, 2, 3], streamed=True)
    reserve, _ = await legs(prefill, decode)
    found = rig.dispatcher.attempt(reserve.room)
    assert found is not None
    first(prefill, reserve.room, 50)
    prefill.say(PrefillDone(room=reserve.room, stages={"queued": 0.1}))
    await eventually(lambda: found.transferred)
    assert (client.ids, found.next_offset) == ([], 1)
    return client, prefill, decode, reserve.room


async def test_its_time_in_metrics_and_logs_is_when_it_left(long_timers: list[asyncio.TimerHandle]) -> None:
    async with router_rig(first_token_hold=LONG) as rig:
        client, _, decode, room = await held(rig)
        await asyncio.sleep(0.05)
        assert client.ids == []
        decode.tokens(room, 1, [51])
        await client.until(2)
        decode.tokens(room, 2, [52], "stop")
        await client.done()
        assert (client.ids, client.finish, client.error) == ([50, 51, 52], "stop", None)
        assert [delta.cached_tokens for delta in client.deltas] == [0, None]
        rig.nothing_left()
        assert [timer.cancelled() for timer in long_timers] == [True]
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert report["stages"]["first_token"] - report["stages"]["placed"] > 0.05


async def test_no_second_token_is_needed() -> None:
    async with router_rig(first_token_hold=0.05) as rig:
        client, _, decode, room = await held(rig)
        await client.until(1)
        decode.tokens(room, 1, [51], "stop")
        await client.done()
        assert [[token.id for token in delta.tokens] for delta in client.deltas] == [[50], [51]]
        rig.nothing_left()


@pytest.mark.parametrize("cause", ["failed", "abort", "client leaves", "router ends"])
async def test_the_end_of_its_request_ends_the_hold(
    cause: str, long_timers: list[asyncio.TimerHandle]
) -> None:
    async with router_rig(first_token_hold=LONG, max_attempts=1) as rig:
        client, _, decode, room = await held(rig)
        if cause == "failed":
            decode.say(Failed(room=room, code=RequestError.code, message="no"))
        elif cause == "abort":
            assert rig.dispatcher.running.abort("", ["r1"]) == 1
        elif cause == "client leaves":
            await client.leave()
        else:
            rig.dispatcher.end_all(Unavailable("the router ends"))
        await client.done()
        assert client.ids == ([] if cause == "client leaves" else [50])
        assert (client.error is not None) == (cause in ("failed", "router ends"))
        rig.nothing_left()
        assert [timer.cancelled() for timer in long_timers] == [True]


async def test_a_lost_node_does_not_lose_it(long_timers: list[asyncio.TimerHandle]) -> None:
    """The next attempt continues after it, and the client, whose stream has begun, gets what follows at once."""
    async with router_rig(first_token_hold=LONG) as rig:
        client, prefill, decode, _ = await held(rig)
        other = await rig.node("decode", "decode-1")
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        reserve, prompt = await other.expect(Reserve), await prefill.expect(Prefill)
        assert (reserve.token_ids, reserve.emitted, client.ids) == ([1, 2, 3, 50], 1, [50])
        first(prefill, prompt.room, 51)
        await client.until(2)
        other.tokens(reserve.room, 1, [52], "length")
        await client.done()
        assert (client.ids, client.finish) == ([50, 51, 52], "length")
        rig.nothing_left()
        assert [timer.cancelled() for timer in long_timers] == [True]


# -- with clients --------------------------------------------------------------------------------------------------

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES | {"model": "tiny-target"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_streams_of_every_api_are_held_and_whole_answers_are_not(serve: Serve, path: str) -> None:
    async with router_rig(first_token_hold=LONG) as cluster:
        prefill, decode = await cluster.pair()
        rig = await serve(source=cluster.dispatcher)
        for stream in (True, False):
            reader, writer = await connect(rig, path, BODIES[path] | {"stream": stream})
            reserve, _ = await legs(prefill, decode)
            found = cluster.dispatcher.attempt(reserve.room)
            assert found is not None
            assert (found.hold is not None) == stream
            first(prefill, reserve.room, 300)
            await eventually(partial(getattr, found, "next_offset"))
            decode.tokens(reserve.room, 1, [301, 302], "length")
            assert b" 200 OK" in await reader.readline()
            await leave(writer)


async def test_each_choice_is_held_by_itself(serve: Serve) -> None:
    async with router_rig(first_token_hold=LONG) as cluster:
        prefill, decode = await cluster.pair()
        rig = await serve(source=cluster.dispatcher)
        reader, writer = await connect(rig, "/v1/completions", asked(3, prompt=[[300], [301, 302]]))
        rooms = {}
        for _ in range(2):
            reserve, _ = await legs(prefill, decode)
            rooms[len(reserve.token_ids) - 1] = reserve.room
            first(prefill, reserve.room, 310)
        other = cluster.dispatcher.attempt(rooms[0])
        assert other is not None
        await eventually(lambda: other.next_offset == 1)
        decode.tokens(rooms[1], 1, [311])
        await reader.readuntil(b"\r\n\r\n")
        chunk = await reader.readuntil(b"\n\n")
        assert b'"index":1' in chunk
        assert rig.tokenizer.decode([310, 311], True).encode() in chunk
        assert not other.woken.is_set
        for index, said in enumerate(([311, 312], [312])):
            decode.tokens(rooms[index], 3 - len(said), said, "length")
        rest = await reader.readuntil(b"[DONE]")
        assert rig.tokenizer.decode([310, 311, 312], True).encode() in rest
        await leave(writer)
