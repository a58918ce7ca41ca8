"""Collectives of torch's process groups, over Gloo: ranks are threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.engine.collectives.process_group import ProcessGroupCollectives, TorchGroup
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.errors import RankFailed
from common.kv_cache.shard import Shard
from tests.fakes.thread_ranks import run_groups, thread_groups
from tests.fakes.waiting import PATIENCE

SIZE = 3


def gloo(store: Any, shard: Shard) -> TorchGroup:
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, timedelta(seconds=PATIENCE))  # type: ignore[return-value]


def own(rank: int, width: int) -> Tensor:
    return torch.arange(4 * width, dtype=torch.float32).view(4, width) * (rank + 1)


def collectives(host: SharedMemoryGroup) -> list[Tensor]:
    group, rank = ProcessGroupCollectives(host, gloo), host.shard.rank
    width = len(host.shard.tokens(10))
    found = [
        group.all_reduce(own(rank, 5).t()),
        group.all_gather(own(rank, width), 10),
        group.broadcast(own(rank, 5), 2),
    ]
    with pytest.raises(AssertionError, match="columns of"):
        group.all_gather(own(rank, 7), 10)
    group.check()
    host.all_reduce(torch.zeros(1))  # all have ended their calls
    group.close()
    return found


def test_sums_unequal_columns_and_broadcasts() -> None:
    results = run_groups(thread_groups(SIZE), collectives)
    for found in results:
        assert isinstance(found, list), found
        assert torch.equal(found[0], own(5, 5).t())  # 1 + 2 + 3
        widths = [len(Shard(rank, SIZE).tokens(10)) for rank in range(SIZE)]
        assert widths == [3, 3, 4]
        assert torch.equal(
            found[1], torch.cat([own(rank, width) for rank, width in enumerate(widths)], dim=-1)
        )
        assert torch.equal(found[2], own(2, 5))


class Aborted:
    """Stands for a process group whose calls a GPU would have to end."""

    def __init__(self) -> None:
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


def test_an_abandoned_group_is_aborted_once_and_names_the_rank() -> None:
    made = Aborted()

    def run(host: SharedMemoryGroup) -> None:
        group = ProcessGroupCollectives(host, lambda *_: made)  # type: ignore[arg-type]
        host.all_reduce(torch.zeros(1))  # the store of rank 0 must not close before the others have opened it
        if host.shard.rank:
            return
        group.check()
        group.abandon(1)
        with pytest.raises(RankFailed, match="rank 1 has ended") as caught:
            group.check()
        assert caught.value.rank == 1
        group.close()

    assert run_groups(thread_groups(2), run) == [None, None]
    assert made.aborts == 1


class OnTheCurrentStream:
    """Stands for NCCL, whose calls without a stream of their own return nothing to wait for."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0].mul_(2)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> None:
        assert not options.asyncOp
        for each in outputs[0]:
            each.copy_(inputs[0])

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        assert not options.asyncOp
        tensors[0].fill_(options.rootRank)

    def abort(self) -> None: ...


def test_calls_use_no_stream_of_their_own() -> None:
    def run(host: SharedMemoryGroup) -> list[Tensor]:
        group = ProcessGroupCollectives(host, lambda *_: OnTheCurrentStream())
        x = torch.ones(2, 3)
        found = [group.all_reduce(x), group.all_gather(x, 6), group.broadcast(x, 1)]
        host.all_reduce(torch.zeros(1))
        group.close()
        return found

    for found in run_groups(thread_groups(2), run):
        assert isinstance(found, list), found
        assert [each.tolist() for each in found] == [[[2.0] * 3] * 2, [[1.0] * 6] * 2, [[1.0] * 3] * 2]
