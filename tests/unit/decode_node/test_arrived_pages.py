"""Requests whose pages are compared while they take part in steps, as on a GPU: damaged ones emit nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from common.node.completion import Deferred
from kv_transfer.pair_plan import Side
from kv_transfer.transport.page_digest import HostDigests
from tests.fakes.loopback import Fault
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

SHAPE = Shape(page_size=4, checks_later=True, completion=Deferred)


class Comparing:
    """The checksums of one room, which a device computes until `held` is False."""

    def __init__(self) -> None:
        self.held = True
        self.waits = 0

    def ready(self) -> bool:
        return not self.held

    def wait(self) -> None:
        self.waits += self.held


@contextmanager
def device_compares() -> Iterator[list[Comparing]]:
    """Let checksums in host memory be computed as on a device: at the record, but not known until the test says so."""
    started: list[Comparing] = []

    def start(self: HostDigests, side: Side, pages: Sequence[int], slot: int) -> tuple[list[int], Comparing]:
        started.append(Comparing())
        return [*self.now(side, pages), *([self.state(side, slot)] if side.state else [])], started[-1]

    with mock.patch.object(HostDigests, "start", start):
        yield started


@pytest.mark.parametrize("in_time", [False, True])
def test_a_request_joins_before_its_pages_are_compared(in_time: bool) -> None:
    """The outcome is looked at in each turn, and waited for at the first results at the latest."""
    with device_compares() as started, NodeCluster(SHAPE) as cluster:
        call = cluster.submit(prompt_of(22), 6)
        cluster.run(until=lambda: bool(started))
        assert [each.in_flight for each in cluster.decode.node.queues.live()] == [1]
        assert cluster.decode.space.cache.cached_pages == 0, "nobody may use pages that were not compared"
        assert [each.waits for each in started] == [0]
        started[0].held = not in_time
        cluster.run()
        expect_reference(call)
        assert started[0].waits == (not in_time)
        assert cluster.decode.space.cache.cached_pages > 0
        cluster.settle()


@pytest.mark.parametrize("in_time", [False, True])
def test_nothing_of_a_damaged_request_leaves_the_node(in_time: bool) -> None:
    """It fails as if its pages had been compared first, and is prefilled again; its batch continues."""
    with device_compares() as started, NodeCluster(replace(SHAPE, decodes=1)) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage="corrupt" if n == 0 else "none")
        calls = [cluster.submit(prompt_of(n, n), 6) for n in (22, 30)]
        cluster.run(until=lambda: len(started) == 2)
        started[0].held = started[1].held = not in_time
        cluster.run()
        expect_reference(*calls)
        assert sorted(call.attempts for call in calls) == [1, 2]
        assert [failure.code for failure in cluster.failures] == ["checksum_failed"]
        assert "differs from what was sent" in cluster.failures[0].message
        counters = cluster.decode.receiver.counters
        assert counters.checksum_failures == 1
        assert cluster.decode.link.counters.transfer_failures == 1
        cluster.settle()


def test_pages_of_a_request_that_ends_early_are_not_kept() -> None:
    with device_compares() as started, NodeCluster(SHAPE) as cluster:
        call = cluster.submit(prompt_of(22), 6)
        cluster.run(until=lambda: bool(started))
        cluster.abort(call)
        cluster.turn(4)
        assert list(cluster.decode.node.queues.live()) == []
        assert cluster.decode.space.cache.cached_pages == 0
        assert started[0].waits == 0
        cluster.settle()


def test_a_request_is_not_retracted_before_its_pages_are_compared() -> None:
    """Saved pages would be loaded again without a comparison. It has no page for its first step, which it waits for."""
    shape = replace(SHAPE, decode_pool=64, decode_cache=False, reserved_tokens=0)
    with device_compares() as started, NodeCluster(shape) as cluster:
        first = cluster.submit(prompt_of(32), 28)
        cluster.run(until=lambda: bool(started))
        started[0].held = False
        late = cluster.submit(prompt_of(16, 1), 6, legs="d")
        cluster.run(until=lambda: len(first.output) >= 13)
        cluster.send_leg(late, "p")
        queues = cluster.decode.node.queues
        cluster.run(until=lambda: any(each.retract for each in queues.running.values()))
        cluster.turn(4)
        (victim,) = (each for each in queues.running.values() if each.retract)
        assert list(victim.prompt) == late.prompt
        assert victim.checks
        started[1].held = False
        cluster.turn()
        assert list(queues.retracted) == [victim]
        assert not victim.checks
        cluster.run()
        expect_reference(first, late)
        cluster.settle()
