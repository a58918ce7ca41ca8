"""What many requests need at the same moment is spread over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken
from common.messages.router_inbox import FirstToken, Goodbye, TokenRun, Tokens
from router import dispatcher
from router.attempt import Attempt
from router.control_plane import STEPS_PER_TURN
from router.legs import placement_messages
from router.turns import PER_TURN
from tests.fakes.router_rig import legs, router_rig
from tests.fakes.waiting import eventually


class TurnCount:
    """Counts turns of the event loop, and what happens in each."""

    def __init__(self) -> None:
        self.turn = 0
        self.events: Counter[int] = Counter()  # turn -> how many

    def note(self) -> None:
        self.events[self.turn] += 1

    async def run(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def counting() -> AsyncIterator[TurnCount]:
    count = TurnCount()
    task = asyncio.create_task(count.run())
    try:
        yield count
    finally:
        task.cancel()


async def test_requests_that_lose_their_node_are_placed_again_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = 10 * PER_TURN
    async with router_rig() as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([1, 2, 3]) for _ in range(requests)]
        await eventually(lambda: sum(isinstance(each, Reserve) for each in decode.received()) == requests)
        async with counting() as count:

            def noted(*arguments: Any) -> Any:
                count.note()
                return placement_messages(*arguments)

            monkeypatch.setattr(dispatcher, "placement_messages", noted)
            await rig.node("decode", "decode-1")
            decode.say(Goodbye(incarnation=decode.ref.incarnation))
            await eventually(lambda: sum(count.events.values()) == requests)
        assert max(count.events.values()) <= 2 * PER_TURN
        for client in clients:
            await client.leave()


async def test_a_step_of_many_requests_is_handled_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = 5 * STEPS_PER_TURN
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client(max_tokens=runs + 1)
        reserve, _ = await legs(prefill, decode)
        room = reserve.room
        prefill.say(FirstToken(room=room, token=OutputToken(0), finish_reason=None, cached_tokens=0))
        await client.until(1)
        on_run = Attempt.on_run
        async with counting() as count:

            def noted(self: Attempt, run: TokenRun) -> None:
                count.note()
                on_run(self, run)

            monkeypatch.setattr(Attempt, "on_run", noted)
            ids = range(1, runs + 1)
            last = {runs: "length"}
            decode.say(Tokens(runs=[TokenRun(room, n, [OutputToken(n % 99)], last.get(n)) for n in ids]))
            decode.tokens(room, 1, [7])  # a repetition that comes after all of them
            await client.done()
            await eventually(lambda: sum(count.events.values()) >= runs)
        assert client.ids == [0, *(n % 99 for n in ids)]
        assert max(count.events.values()) <= 2 * STEPS_PER_TURN
