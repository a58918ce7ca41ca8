"""Work is spread over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from router.process.turns import Turns
from tests.fakes.waiting import eventually


class TurnCount:
    """Counts the turns of the loop while used as an async context."""

    def __init__(self) -> None:
        self.turn = 0

    async def __aenter__(self) -> TurnCount:
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_a_crowd_is_let_through_in_order_and_a_few_per_turn() -> None:
    turns, order = Turns(per_turn=3), []
    async with TurnCount() as count:

        async def one(number: int) -> None:
            await turns.wait()
            order.append((number, count.turn))

        await asyncio.gather(*(one(number) for number in range(20)))
    assert [number for number, _ in order] == list(range(20))
    assert max(Counter(turn for _, turn in order).values()) <= 3


async def test_a_single_task_does_not_wait() -> None:
    turns = Turns(per_turn=1)
    for _ in range(3):
        async with TurnCount() as count:
            await turns.wait()
            assert count.turn == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_task_cancelled_while_waiting_takes_no_turn() -> None:
    turns = Turns(per_turn=1)
    waiting = [asyncio.create_task(turns.wait()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[1:4]:
        task.cancel()
    await asyncio.wait_for(waiting[4], 30)
    assert waiting[0].done()
    assert all(task.cancelled() for task in waiting[1:4])


async def test_calls_keep_their_order_among_those_that_wait() -> None:
    turns, order = Turns(per_turn=2), []
    async with TurnCount() as count:

        async def one(number: int) -> None:
            await turns.wait()
            order.append((number, count.turn))

        tasks = []
        for number in range(0, 20, 2):
            turns.call(lambda number=number: order.append((number, count.turn)))  # type: ignore[misc]
            tasks.append(asyncio.create_task(one(number + 1)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert sorted(number for number, _ in order) == list(range(20))
    assert [number for number, _ in order if number % 2 == 0] == list(range(0, 20, 2))
    assert max(Counter(turn for _, turn in order).values()) <= 4


class Ticking:
    """A clock that only advances when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += 1.0


async def test_calls_that_take_long_end_a_turn_early() -> None:
    clock = Ticking()
    turns, order = Turns(per_turn=8, seconds=1.5, clock=clock), []

    def call(number: int) -> None:
        clock.work()
        order.append((number, count.turn))

    async with TurnCount() as count:
        at_once = [turns.call(lambda number=number: call(number)) for number in range(10)]  # type: ignore[misc]
        assert at_once == [True] * 2 + [False] * 8
        await eventually(lambda: len(order) == 10)
    assert [number for number, _ in order] == list(range(10))
    assert max(Counter(turn for _, turn in order).values()) == 2


async def test_a_call_that_raises_does_not_hold_up_the_others() -> None:
    loop, reported = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    turns, done = Turns(per_turn=1), []

    def fail() -> None:
        raise ValueError("a defect")

    for function in (lambda: done.append(1), fail, lambda: done.append(2)):
        turns.call(function)
    await eventually(lambda: done == [1, 2])
    assert [str(error) for error in reported] == ["a defect"]
