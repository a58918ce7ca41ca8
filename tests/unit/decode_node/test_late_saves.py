"""Pages of retracted requests are copied to host memory while steps go on, and are reused only afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Never

import pytest
import torch

from common.errors import InternalError
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from decode_node.backups import SAVE_SECONDS, Backups, allocated
from decode_node.request import DecodeRequest
from decode_node.step_plan import Load, Save
from tests.fakes.late_lane import LateLane
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of

SMALL = Shape(page_size=4, decode_pool=96, reserved_tokens=4)


@contextmanager
def saving(
    completion: Callable[[], Completion] = Immediate,
) -> Iterator[tuple[NodeCluster, LateLane, list[Call], DecodeRequest]]:
    """Requests that do not fit together, at the moment at which the first save of one of them is in progress."""
    lane = LateLane()
    with NodeCluster(replace(SMALL, lane=lane, completion=completion)) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, seed=n, **SAMPLED) for n in range(2)]
        calls += [cluster.submit(prompt_of(12 + n, n), 40) for n in range(2)]
        cluster.run(until=lambda: bool(lane.copies))
        (victim,) = cluster.decode.node.queues.retracted
        yield cluster, lane, calls, victim


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_pages_are_free_only_after_the_copy_and_the_request_continues_from_it(
    completion: Callable[[], Completion],
) -> None:
    with saving(completion) as (cluster, lane, calls, victim):
        said = sum(len(call.ids) for call in calls)
        cluster.turn(20)
        assert sum(len(call.ids) for call in calls) > said, "the others go on"
        assert list(cluster.decode.node.queues.retracted) == [victim], "nobody else is retracted meanwhile"
        assert cluster.decode.retraction.frees_pages, "its pages are not free yet"
        lane.finish()  # fails if the pages were written to
        cluster.turn(1)
        assert not cluster.decode.retraction.frees_pages
        saves = 0
        while not all(call.over for call in calls):
            cluster.turn(3)
            saves += len(lane.unfinished)
            lane.finish()
            assert cluster.turns < 3000
        expect_reference(*calls)
        assert saves > 0, "requests were retracted more than once"
        assert not cluster.failures
        cluster.settle()


def test_a_request_is_not_resumed_before_it_is_saved() -> None:
    """Its load would let the step of all others wait for the copy."""
    with saving() as (cluster, lane, calls, victim):
        for call in calls:
            if call.room != victim.room:
                cluster.abort(call)
        cluster.turn(10)
        assert list(cluster.decode.node.queues.retracted) == [victim]
        assert cluster.decode.space.available_pages > 10, "there is room for it"
        lane.finish()
        cluster.run()
        expect_reference(cluster.calls[calls.index(next(c for c in calls if c.room == victim.room))])
        cluster.settle()


def test_an_abort_during_the_copy_frees_everything_after_it() -> None:
    with saving() as (cluster, lane, calls, _):
        for call in calls:
            cluster.abort(call)
        cluster.turn(10)
        assert not len(cluster.decode.node.queues)
        assert cluster.decode.backups.nbytes == cluster.decode.retraction.used_bytes == 0
        cache = cluster.decode.space.cache
        assert cache.evictable_pages < cache.cached_pages, "the copy still reads the pages"
        assert cluster.decode.rows.free < SMALL.max_running
        lane.finish()
        cluster.settle()
        again = cluster.submit(prompt_of(13), 20)
        cluster.run()
        expect_reference(again)
        cluster.settle()


def test_a_copy_that_never_ends_is_an_error() -> None:
    """Its pages would never be free, and the node would hang without a word."""
    with saving() as (cluster, lane, _, victim):
        cluster.decode.node.queues.retracted.clear()
        cluster.clock.now += SAVE_SECONDS + 1
        with pytest.raises(InternalError, match=f"request {victim.room} .* does not make progress; restart"):
            cluster.turn_one(cluster.decode)
        lane.finish()


@pytest.mark.parametrize(("nbytes", "pinned"), [(0, 0), (1, 1), (8, 8), (9, 16), (5 << 20, 8 << 20)])
def test_pinned_memory_counts_as_torch_rounds_it(nbytes: int, pinned: int) -> None:
    assert (allocated(nbytes, pinned=True), allocated(nbytes, pinned=False)) == (pinned, nbytes)


def test_a_backup_counts_each_of_its_pinned_blocks_rounded() -> None:
    with NodeCluster(SMALL) as cluster:
        pool, relay = cluster.decode.pool, cluster.decode.relay
        pageable = Backups([pool], relay, LateLane())
        assert pageable.size_of(3) == 3 * pool.page_bytes
        pool.device = torch.device("cuda")
        pinned = Backups([pool], relay, LateLane())
        assert [pinned.size_of(pages) for pages in (1, 3, 4, 5)] == [
            pages * pool.page_bytes for pages in (1, 4, 4, 8)
        ]


def test_too_little_device_memory_costs_a_retracted_request_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages are then copied without memory of the device, in both directions."""

    def full(*_: object) -> Never:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr("common.engine.state.pool.on_device", full)
    with NodeCluster(SMALL) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, seed=n, **SAMPLED) for n in range(4)]
        cluster.run()
        expect_reference(*calls)
        retractions = cluster.decode.link.counters.retractions
        assert not cluster.failures
        cluster.settle()
    said = [each.fields for each in caplog.records if each.message.endswith("one by one")]  # type: ignore[attr-defined]
    assert len(said) == 2 * retractions > 0, "each was saved and loaded"
    assert said[0] == {"reason": "CUDA out of memory. Tried to allocate 20.00 MiB."}


def test_a_load_of_the_same_plan_follows_the_save() -> None:
    lane = LateLane()
    with NodeCluster(replace(SMALL, lane=lane)) as cluster:
        call = cluster.submit(prompt_of(10), 40)
        cluster.run(until=lambda: len(call.ids) > 3)
        (request,) = cluster.decode.node.queues.running.values()
        assert request.lease is not None
        pool, relay = cluster.decode.pool, cluster.decode.relay
        backups = Backups([pool], relay, lane)
        pages = tuple(request.lease.pages[:2])
        spare = tuple(page for page in range(1, pool.num_pages) if page not in request.lease.pages)[:2]
        backups.save(Save(1, request.row, pages))
        assert backups.unsaved() == {1}
        backups.load(Load(1, request.row + 1, 0, spare))
        assert backups.unsaved() == set()
        for layer in range(pool.num_layers):
            for plane in (pool.key(layer), pool.value(layer)):
                assert plane[list(spare)].equal(plane[list(pages)])
                assert plane[list(pages)].any()
