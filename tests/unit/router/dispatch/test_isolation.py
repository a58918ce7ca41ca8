"""Suspected requests run in a few groups, one after the other; a group that takes too long holds nobody up for long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from router.dispatch import isolation as module
from router.dispatch.isolation import GROUPS, Isolation, Trial
from tests.fakes.waiting import PATIENCE, eventually


async def entering(isolation: Isolation, crashes: Sequence[int]) -> list[asyncio.Task[Trial]]:
    tasks = [asyncio.create_task(isolation.enter(each, PATIENCE)) for each in crashes]
    await asyncio.sleep(0)
    return tasks


async def admitted(tasks: Sequence[asyncio.Task[Trial]]) -> list[Trial]:
    """The trials that run now."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.result() for task in tasks if task.done() and task.result().isolated]


async def sizes_until_all_have_run(isolation: Isolation, tasks: Sequence[asyncio.Task[Trial]]) -> list[int]:
    sizes = []
    while not all(task.done() for task in tasks):
        group = await admitted(tasks)
        assert group
        assert {trial.companions for trial in group} == {len(group) - 1}
        sizes.append(len(group))
        for trial in group:
            trial.release()
        await admitted(tasks)
    return sizes


async def test_a_few_suspects_run_one_at_a_time() -> None:
    isolation = Isolation()
    tasks = await entering(isolation, [2] * GROUPS)
    assert await sizes_until_all_have_run(isolation, tasks) == [1] * (GROUPS - 1)
    for task in tasks:
        task.result().release()


async def test_many_suspects_run_in_a_few_groups() -> None:
    isolation = Isolation()
    # the first one runs as soon as it arrives
    tasks = await entering(isolation, [2] * 801)
    sizes = await sizes_until_all_have_run(isolation, tasks)
    assert sizes[:3] == [1, 100, 100]
    assert len(sizes) <= GROUPS + 1
    for task in tasks:
        task.result().release()


async def test_the_members_of_a_group_that_crashed_run_in_smaller_groups() -> None:
    isolation = Isolation()
    first = await entering(isolation, [2])
    again = await entering(isolation, [3] * 16)
    (await admitted(first))[0].release()
    assert [trial.companions for trial in await admitted(again)] == [1, 1]
    for task in again:
        task.cancel()
    await asyncio.gather(*again, return_exceptions=True)


async def test_a_group_whose_requests_take_long_makes_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.0)
    isolation = Isolation()
    first, second = await entering(isolation, [2, 2])
    [trial] = await admitted([first])
    await asyncio.sleep(0.01)
    assert not second.done(), "the first one has not been placed yet"
    trial.placed()
    await eventually(second.done)
    assert not trial.isolated


async def test_the_wait_is_bounded_and_who_leaves_frees_its_place() -> None:
    isolation = Isolation()
    running, leaving, following = await entering(isolation, [2, 2, 2])
    assert not (await isolation.enter(2, 0.0)).isolated
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    running.result().release()
    [trial] = await admitted([following])
    trial.release()
    trial.release()
    assert (await isolation.enter(2, PATIENCE)).isolated


async def test_a_request_cancelled_during_admission_blocks_nobody() -> None:
    isolation = Isolation()
    running, leaving, following = await entering(isolation, [2, 2, 2])
    running.result().release()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await admitted([following])
