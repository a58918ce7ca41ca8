"""Collectives over shared memory: results, ranks that end, stall or diverge, and graphs that contain them."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from common.engine.collectives.endpoints import GroupEndpoint, open_endpoints
from common.engine.collectives.group import all_gather, all_reduce, broadcast
from common.engine.collectives.shared_memory_group import TIMEOUT, SharedMemoryGroup
from common.engine.graphs.backends.base import Recording
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.errors import RankFailed
from common.node.announced_work import MAX_SECONDS
from common.observability.start_progress import StartProgress
from tests.cluster import fork_server
from tests.cluster.harness import ROOT
from tests.fakes.descriptors import open_descriptors
from tests.fakes.stopped_process import is_stopped
from tests.fakes.thread_ranks import run_groups, run_ranks, thread_groups
from tests.fakes.waiting import PATIENCE, until

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def given(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(tuple(shape), generator=generator) * 9).abs().to(dtype)


def all_ranks(size: int, slot_bytes: int, run: Callable[[SharedMemoryGroup], Tensor]) -> list[Tensor]:
    results = run_groups(thread_groups(size, slot_bytes=slot_bytes), run)
    for each in results:
        assert isinstance(each, Tensor), each
    return [each for each in results if isinstance(each, Tensor)]


def rank_of(group: SharedMemoryGroup) -> int:
    return group.shard.rank


@pytest.mark.parametrize("slot_bytes", [64, 1 << 12], ids=["many rounds", "one round"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_made_in_the_order_of_the_ranks(dtype: torch.dtype, size: int, slot_bytes: int) -> None:
    shape = (5, 13)
    found = all_ranks(size, slot_bytes, lambda group: group.all_reduce(given(rank_of(group), shape, dtype)))
    wide = torch.float32 if dtype.is_floating_point else dtype
    total = given(0, shape, dtype).to(wide)
    for rank in range(1, size):
        total = total + given(rank, shape, dtype).to(wide)
    assert all(torch.equal(each, total.to(dtype)) for each in found)


@pytest.mark.parametrize("slot_bytes", [64, 1 << 12], ids=["many rounds", "one round"])
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 3), (0,)])
def test_unequal_columns_are_gathered_in_order(rows: tuple[int, ...], slot_bytes: int) -> None:
    widths = (8, 9, 9)

    def own(rank: int) -> Tensor:
        return given(rank, (*rows, widths[rank]), torch.float32)

    found = all_ranks(3, slot_bytes, lambda group: group.all_gather(own(rank_of(group)), sum(widths)))
    assert all(torch.equal(each, torch.cat([own(rank) for rank in range(3)], dim=-1)) for each in found)


def test_other_columns_than_announced_are_an_error() -> None:
    found = run_groups(thread_groups(2), lambda group: group.all_gather(torch.zeros(2, 3), 7))
    assert all(isinstance(each, AssertionError) for each in found)


@pytest.mark.parametrize("source", [0, 2])
def test_a_broadcast_gives_all_ranks_the_values_of_one(source: int) -> None:
    def run(group: SharedMemoryGroup) -> Tensor:
        return group.broadcast(given(rank_of(group), (40,), torch.int64), source)

    assert all(torch.equal(each, given(source, (40,), torch.int64)) for each in all_ranks(3, 64, run))


def test_collectives_follow_one_another() -> None:
    """A fast rank does not overwrite what a slow one still reads."""

    def run(group: SharedMemoryGroup) -> Tensor:
        found = torch.full((30,), float(rank_of(group)))
        for step in range(50):
            found = group.all_reduce(found) / 2 + step
            found = group.all_gather(found[:11], 33)[: 30 - step % 2]
            found = torch.cat((found, group.broadcast(found[:1], step % 3)))[:30]
        return found

    first, *others = all_ranks(3, 64, run)
    assert all(torch.equal(each, first) for each in others)


def test_rows_with_strides_are_taken_as_they_look() -> None:
    def run(group: SharedMemoryGroup) -> Tensor:
        return group.all_reduce(given(rank_of(group), (4, 6), torch.float32).t())

    for each in all_ranks(2, 64, run):
        assert torch.equal(each, (given(0, (4, 6), torch.float32) + given(1, (4, 6), torch.float32)).t())


def test_all_name_the_rank_that_has_ended() -> None:
    def run(group: SharedMemoryGroup) -> object:
        group.all_reduce(torch.ones(3))
        if rank_of(group) == 1:
            raise ValueError("rank 1 has a defect")
        with pytest.raises(RankFailed, match="rank 1 has (ended|failed)") as first:
            group.all_reduce(torch.ones(3))
        with pytest.raises(RankFailed) as second:  # the group stays broken
            group.broadcast(torch.ones(3), 0)
        return first.value.rank, second.value.rank

    ranks = run_groups(thread_groups(4), run)
    assert [each for rank, each in enumerate(ranks) if rank != 1] == [(1, 1)] * 3


def test_a_rank_that_does_not_answer_is_named_after_the_timeout() -> None:
    """Until then a start that waits here is not without progress: its own limit may be shorter."""
    waiting, silent = thread_groups(2, timeout=0.05)
    start = StartProgress()
    with start.current(), pytest.raises(RankFailed, match=r"rank 1 has not answered for 0\.05 s") as found:
        waiting.all_reduce(torch.ones(3))
    assert found.value.rank == 1
    assert start.steps == 1
    waiting.close()
    silent.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda group: group.all_reduce(torch.ones(4)), "16 bytes of float32 .* 12 bytes of float32"),
        (lambda group: group.all_reduce(torch.ones(3).int()), "12 bytes of int32 .* 12 bytes of float32"),
        (lambda group: group.broadcast(torch.ones(3), 0), "calls broadcast .* calls all_reduce"),
    ],
)
def test_ranks_that_make_different_calls_fail(other: Callable[[Any], Tensor], said: str) -> None:
    def run(group: SharedMemoryGroup) -> Tensor:
        return other(group) if rank_of(group) else group.all_reduce(torch.ones(3))

    found, _ = run_groups(thread_groups(2), run)
    with pytest.raises(RankFailed, match=said):
        raise found if isinstance(found, Exception) else AssertionError(found)


def test_fake_tensors_get_shapes_without_the_other_ranks() -> None:
    (group,) = thread_groups(1)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        assert all_reduce(x, group.number).shape == (2, 3)
        assert broadcast(x, group.number, 0).shape == (2, 3)
        assert all_gather(x, group.number, 7).shape == (2, 7)
    group.close()


def test_a_graph_contains_collectives_and_replays_them_with_new_values() -> None:
    def run(group: SharedMemoryGroup) -> list[Tensor]:
        rank, number = rank_of(group), group.number
        x = torch.zeros(4, 3 + rank)

        def forward() -> tuple[Tensor, Tensor, Tensor]:
            whole = all_gather(x + 1, number, 7)
            return whole, all_reduce(whole * 2, number), broadcast(x[:, :3], number, 1)

        recording: Recording[Any] = FullGraphs(TapeRecorder()).capture(forward)
        found = []
        with torch.inference_mode():
            for step in range(3):
                x.copy_(given(2 * step + rank, x.shape, torch.float32))
                recording.replay()
                found += [each.clone() for each in recording.output]
        return found

    first, second = run_ranks(2, lambda ranks: run(ranks.group))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for step in range(3):
        ours, theirs = given(2 * step, (4, 3), torch.float32), given(2 * step + 1, (4, 4), torch.float32)
        whole, total, sent = first[3 * step : 3 * step + 3]
        assert torch.equal(whole, torch.cat((ours, theirs), dim=1) + 1)
        assert torch.equal(total, (whole * 2) * 2)
        assert torch.equal(sent, theirs[:, :3])


def start_rank(endpoint: GroupEndpoint, timeout: float = PATIENCE, stops: int = 0) -> fork_server.Fork:
    text = msgspec.json.encode(endpoint).decode()
    program = ["tests.fakes.summing_rank", text, str(timeout), str(stops)]
    with open(2, "wb", closefd=False) as log:
        process = fork_server.start(program, ROOT, dict(os.environ), log, descriptors=endpoint.descriptors)
    endpoint.close()
    return process


def reduce_often(group: SharedMemoryGroup, x: Tensor) -> None:
    """More often than a rank may be ahead of another one."""
    for _ in range(3):
        group.all_reduce(x)


@pytest.mark.parametrize(
    ("number", "timeout", "said"),
    [
        (signal.SIGKILL, PATIENCE, "rank 1 has ended"),
        (signal.SIGSTOP, 0.5, "rank 1 has not answered"),
    ],
)
def test_ranks_in_processes(number: signal.Signals, timeout: float, said: str) -> None:
    """Two processes compute sums until one of them is killed or stopped."""
    ours, theirs = open_endpoints(2)
    process = start_rank(theirs)
    group = SharedMemoryGroup(ours, PATIENCE)
    try:
        x = torch.arange(100_000.0)
        for _ in range(3):
            assert torch.equal(group.all_reduce(x), 2 * x)
        os.kill(process.pid, number)
        group.timeout = timeout
        with pytest.raises(RankFailed, match=said) as found:
            reduce_often(group, x)
        assert found.value.rank == 1
    finally:
        process.kill()
        process.wait()
        group.close()


def sent_bytes(descriptor: int) -> int:
    """Return the memory of what was sent through a socket and the other end has not read; 0 if there is nothing."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_time_in_which_a_rank_is_stopped_does_not_count() -> None:
    """A node that was stopped as a whole goes on: no rank takes its own stop for the silence of another one.

    The other rank stops itself, so this process may be slow: it gives its answer while the other one is stopped again.
    """
    ours, theirs = open_endpoints(2)
    process = start_rank(theirs, timeout=3.0, stops=2)
    (descriptor,) = ours.peers
    group = SharedMemoryGroup(ours, PATIENCE)
    try:
        x = torch.arange(100_000.0)
        group.all_reduce(x)
        until(lambda: is_stopped(process.pid))
        time.sleep(3.5)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: is_stopped(process.pid))
        with ThreadPoolExecutor(1) as pool:
            summed = pool.submit(reduce_often, group, x)
            until(lambda: sent_bytes(descriptor))
            os.kill(process.pid, signal.SIGCONT)
            summed.result(PATIENCE)
    finally:
        process.kill()
        process.wait()
        group.close()


def test_a_rank_waits_for_as_long_as_another_may_announce() -> None:
    """Rank 0 encodes images before a forward, while the others wait in its first collective."""
    assert TIMEOUT > MAX_SECONDS


def test_processes_that_a_rank_starts_do_not_keep_its_connections_open() -> None:
    """Descriptors that were passed to a process are inheritable there."""
    endpoint, other = open_endpoints(2)
    for each in endpoint.descriptors:
        os.set_inheritable(each, True)
    group = SharedMemoryGroup(endpoint)
    assert not any(os.get_inheritable(each) for each in endpoint.peers)
    group.close()
    other.close()


def test_descriptors_are_closed_with_the_group() -> None:
    before = open_descriptors()
    groups = thread_groups(4)
    while groups:
        groups.pop().close()
    assert open_descriptors() == before
