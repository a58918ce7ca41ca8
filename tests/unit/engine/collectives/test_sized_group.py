"""The group that chooses between two by the size of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group import CollectiveGroup, DeviceGroup
from common.engine.collectives.sized_group import SizedDeviceGroup, max_small_bytes
from common.engine.ops.peer_memories import ROW_BYTES
from common.kv_cache.shard import Shard

VALUES = max_small_bytes(2) // 4  # of float32


class Recording(FakeGroup, DeviceGroup):
    """Notes its calls."""

    def __init__(self, shard: Shard, warm_up: Recording | None = None) -> None:
        super().__init__(shard)
        self.calls: list[str] = []
        self.lost: list[int] = []
        self._warm_up = warm_up or self

    @property
    def fake(self) -> Recording:
        return self._warm_up

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return super().all_reduce(x)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("all_reduce_norm")
        return x, residual

    def all_reduce_fp8_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("all_reduce_fp8_norm")
        return x, x, residual

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        self.calls.append("all_gather")
        return super().all_gather(x, columns)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.calls.append("broadcast")
        return super().broadcast(x, source)

    def check(self) -> None:
        self.calls.append("check")

    def abandon(self, rank: int) -> None:
        self.lost.append(rank)

    def close(self) -> None:
        self.calls.append("close")


def ways(rank: int = 0, size: int = 2) -> tuple[Recording, Recording, SizedDeviceGroup]:
    shard = Shard(rank, size)
    small, large = (Recording(shard, Recording(shard)) for _ in range(2))
    return small, large, SizedDeviceGroup(small, large)


def call_all(group: CollectiveGroup, x: Tensor) -> None:
    group.all_reduce(x)
    group.all_reduce_norm(x, x, x[0], 1e-5)
    group.all_reduce_fp8_norm(x, x, x[0], 1e-5, False)
    group.broadcast(x, 1)


@pytest.mark.parametrize(("values", "is_small"), [(0, True), (VALUES, True), (VALUES + 1, False)])
def test_the_bytes_of_a_tensor_decide(values: int, is_small: bool) -> None:
    small, large, group = ways()
    call_all(group, torch.zeros(1, values))
    taken, other = (small, large) if is_small else (large, small)
    assert taken.calls == ["all_reduce", "all_reduce_norm", "all_reduce_fp8_norm", "broadcast"]
    assert not other.calls


def test_two_ranks_sum_whole_rows_of_any_number_over_peer_memory() -> None:
    """The limit is for rows that are too wide, and for other calls."""
    small, large, group = ways()
    x = torch.zeros(2 * VALUES // 1024, 1024)
    call_all(group, x)
    assert small.calls == ["all_reduce", "all_reduce_norm", "all_reduce_fp8_norm"]
    assert large.calls == ["broadcast"]
    group.all_reduce(torch.zeros(128, ROW_BYTES // 4 + 1))
    assert large.calls == ["broadcast", "all_reduce"]


def test_more_ranks_give_less_to_the_small_group() -> None:
    """Each of n ranks sends to n - 1 others and receives as much."""
    assert [max_small_bytes(ranks) for ranks in (2, 4, 8)] == [2 << 20, 512 << 10, 128 << 10]
    small, large, group = ways(size=4)
    group.all_reduce(torch.zeros(1, VALUES))
    assert (small.calls, large.calls) == ([], ["all_reduce"])


@pytest.mark.parametrize(("columns", "is_small"), [(2 * VALUES, True), (2 * VALUES + 1, False)])
def test_all_ranks_choose_the_same_group_for_unequal_shares(columns: int, is_small: bool) -> None:
    """One rank's share may be small enough and another's not."""
    for rank in range(2):
        small, large, group = ways(rank)
        own = len(Shard(rank, 2).tokens(columns))
        assert group.all_gather(torch.zeros(1, own), columns).shape == (1, columns)
        assert (small.calls, large.calls) == ((["all_gather"], []) if is_small else ([], ["all_gather"]))


def test_warm_ups_choose_alike_and_meet_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures compute nothing yet, so that they record the groups themselves."""
    small, large, group = ways()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert group.for_capture is group
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for values in (VALUES, VALUES + 1):
        group.for_capture.all_reduce(torch.zeros(1, values))
    assert not small.calls
    assert not large.calls
    assert (small.fake.calls, large.fake.calls) == (["all_reduce"], ["all_reduce"])


def test_both_groups_are_checked_abandoned_and_closed() -> None:
    small, large, group = ways()
    group.check()
    group.abandon(1)
    group.close()
    for each in (small, large):
        assert each.calls == ["check", "close"]
        assert each.lost == [1]
