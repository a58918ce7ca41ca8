"""What large bodies may take together, in which order they get it, and what one client may have of it."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Overloaded
from router.http import body_memory
from router.http.body_memory import BodyMemory, Reservation
from tests.fakes.clock import Clock


class Memory(BodyMemory):
    """Keeps what it reserved, and notes whose uploads it ended."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)
        self.ended: list[str] = []

    async def ask(self, client: str, size: int) -> asyncio.Task[Reservation]:
        """Return a task that asks for memory; it is done if there was memory at once."""
        task = asyncio.create_task(self.reserve(client, size, lambda: self.ended.append(client)))
        await settle()
        return task

    async def give_back(self, task: asyncio.Task[Reservation]) -> None:
        self.release(task.result())
        await settle()


async def settle() -> None:
    """Let the tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(body_memory, "MAX_RESERVED", 100)
    monkeypatch.setattr(body_memory, "MAX_SMALL", 10)
    monkeypatch.setattr(body_memory, "MAX_WAITING", 3)
    monkeypatch.setattr(body_memory, "MIN_RATE", 10)
    return Memory()


async def leave(*tasks: asyncio.Task[Reservation]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_bodies_wait_in_order_and_small_ones_do_not_overtake(memory: Memory) -> None:
    first = [await memory.ask(client, 30) for client in "abc"]
    assert all(task.done() for task in first)
    large, small = await memory.ask("d", 50), await memory.ask("e", 10)
    assert not large.done()
    assert not small.done(), "it would fit, but has to wait its turn"
    await memory.give_back(first[0])
    assert not small.done()
    await memory.give_back(first[1])
    assert large.done()
    assert small.done()
    for task in (first[2], large, small):
        memory.release(task.result())
    assert memory.reserved == 0


async def test_one_client_has_half_of_it_and_others_pass_its_next_body(memory: Memory) -> None:
    first = await memory.ask("slow", 30)
    second = await memory.ask("slow", 30)
    assert not second.done()
    other = await memory.ask("other", 30)
    assert other.done()
    assert not second.done()
    await memory.give_back(first)
    assert second.done()


async def test_a_body_that_waits_for_its_own_client_holds_up_nobody_else(memory: Memory) -> None:
    """Not even if there is too little memory for it, too."""
    first, other = await memory.ask("a", 50), await memory.ask("b", 20)
    second, third = await memory.ask("a", 40), await memory.ask("c", 20)
    assert not second.done()
    assert third.done()
    await memory.give_back(other)
    assert not second.done()
    await memory.give_back(first)
    assert second.done()


async def test_a_body_that_is_larger_than_all_memory_is_received_by_itself(memory: Memory) -> None:
    first = await memory.ask("a", 10)
    huge = await memory.ask("b", 1_000)
    assert not huge.done()
    await memory.give_back(first)
    assert huge.done()
    following = await memory.ask("c", 1)
    assert not following.done()
    await leave(following)


async def test_a_client_that_leaves_while_waiting_takes_no_memory(memory: Memory) -> None:
    first = await memory.ask("a", 100)
    leaving, staying = await memory.ask("b", 50), await memory.ask("c", 50)
    await leave(leaving)
    # Admitted, and cancelled before it runs on.
    memory.release(first.result())
    await leave(staying)
    assert memory.reserved == 0


async def test_how_many_wait_is_bounded(memory: Memory) -> None:
    assert (await memory.ask("a", 100)).done()
    waiting = [await memory.ask("b", 10) for _ in range(3)]
    with pytest.raises(Overloaded, match="too many large bodies"):
        await memory.reserve("c", 10, lambda: None)
    await leave(*waiting)


async def test_slow_uploads_are_ended_while_another_client_waits(memory: Memory) -> None:
    """Four uploads of two clients hold everything; the slowest gives way."""
    uploads = [await memory.ask(client, 25) for client in ("a", "a", "b", "b")]
    for task, received in zip(uploads, (9, 5, 20, 20), strict=True):
        task.result().received = received
    memory.clock.now += 2.0
    memory.revoke_slowest()
    assert not memory.ended, "nobody waits"
    waiting = await memory.ask("c", 25)
    memory.revoke_slowest()
    assert memory.ended == ["a"]
    await memory.give_back(uploads[1])
    assert waiting.done()
    for task in (uploads[0], *uploads[2:], waiting):
        memory.release(task.result())
    assert memory.reserved == 0


async def test_an_upload_that_is_complete_or_young_or_of_the_same_client_is_not_ended(memory: Memory) -> None:
    """The memory of a complete body is in use."""
    complete = await memory.ask("a", 50)
    complete.result().revocable = False
    memory.clock.now += 10.0
    young = await memory.ask("b", 50)
    own = await memory.ask("b", 50)
    memory.revoke_slowest()
    waiting = await memory.ask("c", 50)
    memory.revoke_slowest()
    assert not memory.ended
    memory.clock.now += 2.0
    memory.revoke_slowest()
    assert memory.ended == ["b"]
    memory.revoke_slowest()
    assert memory.ended == ["b"], "once"
    await leave(own, waiting)
    await memory.give_back(young)


async def test_a_client_that_holds_more_than_its_share_gives_way_after_a_while(memory: Memory) -> None:
    """Its uploads are fast enough not to count as slow."""
    uploads = [await memory.ask(client, 25) for client in ("a", "a", "b", "b")]
    waiting = await memory.ask("c", 25)
    for seconds, ended in ((7.0, []), (1.0, ["a"])):
        memory.clock.now += seconds
        for number, task in enumerate(uploads):
            task.result().received = 1_000 + number
        memory.revoke_slowest()
        assert memory.ended == ended
    await memory.give_back(uploads[0])
    following = await memory.ask("d", 25)
    memory.revoke_slowest()
    assert memory.ended == ["a", "b"], "a has as much as d would have"
    await leave(following)
    assert waiting.done()


def test_small_bodies_are_refused_beyond_their_bound(memory: Memory) -> None:
    memory.add_small(10)
    with pytest.raises(Overloaded):
        memory.add_small(1)
    memory.add_small(-10)
    memory.add_small(1)
    assert memory.small == 1
