"""What large bodies may take together, in which order they get it, and what one client may have of it."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Overloaded
from router import body_memory
from router.body_memory import BodyMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> BodyMemory:
    monkeypatch.setattr(body_memory, "MAX_RESERVED", 100)
    monkeypatch.setattr(body_memory, "MAX_SMALL", 10)
    monkeypatch.setattr(body_memory, "MAX_WAITING", 3)
    return BodyMemory()


async def asked(memory: BodyMemory, client: str, size: int) -> asyncio.Task[None]:
    """Return a task that asks for memory; it is done if there was memory at once."""
    task = asyncio.create_task(memory.reserve(client, size))
    await asyncio.sleep(0)
    return task


async def released(memory: BodyMemory, client: str, size: int) -> None:
    memory.release(client, size)
    await asyncio.sleep(0)


async def test_bodies_wait_in_order_and_small_ones_do_not_overtake(memory: BodyMemory) -> None:
    for client in "abc":
        assert (await asked(memory, client, 30)).done()
    large, small = await asked(memory, "d", 50), await asked(memory, "e", 10)
    assert not large.done()
    assert not small.done(), "it would fit"
    await released(memory, "a", 30)
    assert not small.done()
    await released(memory, "b", 30)
    assert large.done()
    assert small.done()
    for client, size in (("c", 30), ("d", 50), ("e", 10)):
        memory.release(client, size)
    assert memory.reserved == 0


async def test_one_client_has_half_of_it_and_others_pass_its_next_body(memory: BodyMemory) -> None:
    assert (await asked(memory, "slow", 30)).done()
    second = await asked(memory, "slow", 30)
    assert not second.done()
    other = await asked(memory, "other", 30)
    await released(memory, "nobody", 0)
    assert other.done()
    assert not second.done()
    await released(memory, "slow", 30)
    assert second.done()


async def test_a_body_that_is_larger_than_all_memory_is_received_by_itself(memory: BodyMemory) -> None:
    assert (await asked(memory, "a", 10)).done()
    huge = await asked(memory, "b", 1_000)
    assert not huge.done()
    await released(memory, "a", 10)
    assert huge.done()
    assert not (await asked(memory, "c", 1)).done()


async def test_who_leaves_while_waiting_takes_nothing(memory: BodyMemory) -> None:
    assert (await asked(memory, "a", 100)).done()
    leaving, staying = await asked(memory, "b", 50), await asked(memory, "c", 50)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    # Admitted, and cancelled before it runs on.
    memory.release("a", 100)
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    assert memory.reserved == 0


async def test_how_many_wait_is_bounded(memory: BodyMemory) -> None:
    assert (await asked(memory, "a", 100)).done()
    waiting = [await asked(memory, "b", 10) for _ in range(3)]
    with pytest.raises(Overloaded, match="too many large bodies"):
        await memory.reserve("c", 10)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_small_bodies_are_refused_beyond_their_bound(memory: BodyMemory) -> None:
    memory.add_small(10)
    with pytest.raises(Overloaded):
        memory.add_small(1)
    memory.add_small(-10)
    memory.add_small(1)
    assert memory.small == 1
