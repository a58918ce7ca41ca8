"""Which group the ranks of a node choose for their GPUs, over a CUDA runtime of host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group import DeviceGroup
from common.engine.collectives.peer_memory_group import PeerMemoryGroup
from common.engine.collectives.process_group import MakeTorchGroup, ProcessGroupCollectives
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.collectives.sized_group import SizedDeviceGroup
from common.errors import ConfigError, RankFailed
from common.node.ranks import device_group as module
from common.node.ranks.device_group import LostRankWatch, RankCollectives, device_group
from common.observability.logs import Log
from tests.fakes.fake_cuda import FakeCuda, FakeHost
from tests.fakes.thread_ranks import run_groups, thread_groups
from tests.fakes.waiting import until

SIZE = 2
CHOSEN: dict[tuple[bool, bool, bool], type[DeviceGroup]] = {
    # (the GPUs map each other's memory, each rank has its own, torch has NCCL)
    (True, True, True): SizedDeviceGroup,
    (True, True, False): PeerMemoryGroup,
    (True, False, True): PeerMemoryGroup,
    (True, False, False): PeerMemoryGroup,
    (False, True, True): ProcessGroupCollectives,
}


class Meeting:
    """What ranks that are threads exchange."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE)
        self._given: list[bytes] = [b""] * SIZE

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(own: bytes) -> Sequence[bytes]:
            self._given[rank] = own
            self._barrier.wait(60)
            found = tuple(self._given)
            self._barrier.wait(60)
            return found

        return exchange


class OnHost(FakeCuda):
    """A process whose only GPU has another ordinal in the host, and whose group needs no kernel."""

    def __init__(self, host: FakeHost, gpu: int, mapped: bool) -> None:
        super().__init__(host, visible=(gpu, 1 - gpu))
        self.mapped = mapped

    def reaches(self, device: int, other: int) -> bool:
        return self.mapped


class Stub(FakeGroup, DeviceGroup):
    """Stands for NCCL's group, for which the ranks here have no GPUs."""

    def __init__(self, host: SharedMemoryGroup, make: MakeTorchGroup) -> None:
        super().__init__(host.shard)

    @property
    def fake(self) -> FakeGroup:
        return self

    def abandon(self, rank: int) -> None:
        raise AssertionError("no rank ends here")


def choose(
    monkeypatch: pytest.MonkeyPatch, mapped: Sequence[bool], gpus: Sequence[int], with_nccl: bool
) -> list[type[DeviceGroup] | Exception]:
    """Return what each rank chooses. NCCL's group is a stand-in."""
    host, meeting = FakeHost(), Meeting()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: with_nccl)
    monkeypatch.setattr(module, "ProcessGroupCollectives", Stub)

    def run(group: SharedMemoryGroup) -> type[DeviceGroup]:
        rank = group.shard.rank
        runtime = OnHost(host, gpus[rank], mapped[rank])
        found = device_group(group, torch.device("cpu"), runtime, meeting.of(rank), Log(f"x/{rank}"))
        return ProcessGroupCollectives if isinstance(found, Stub) else type(found)

    return list(run_groups(thread_groups(SIZE), run))


@pytest.mark.parametrize("case", CHOSEN)
def test_the_group_of_every_kind_of_machine(
    case: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, apart, with_nccl = case
    gpus = (0, 1) if apart else (0, 0)
    assert choose(monkeypatch, (mapped, mapped), gpus, with_nccl) == [CHOSEN[case]] * SIZE


def test_a_rank_that_cannot_map_the_others_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, (True, False), (0, 1), True) == [ProcessGroupCollectives] * SIZE


@pytest.mark.parametrize(("gpus", "with_nccl"), [((0, 1), False), ((0, 0), True)])
def test_gpus_that_cannot_be_connected_are_refused(
    gpus: tuple[int, int], with_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in choose(monkeypatch, (False, True), gpus, with_nccl):
        assert isinstance(found, ConfigError)
        assert found.path == "devices"
        assert "cannot map each other's memory" in str(found)
        assert "write one rank per node" in str(found)


class Lost:
    """Notes which ranks it was told of."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def abandon(self, rank: int) -> None:
        self.ranks.append(rank)


def test_the_watch_tells_of_a_rank_that_has_ended_once() -> None:
    first, second, third = thread_groups(3)
    lost = Lost()
    watch = LostRankWatch(first, lost)  # type: ignore[arg-type]  # a part of a group
    assert first.ended() is None
    third.close()
    until(lambda: bool(lost.ranks))
    assert first.ended() == 2
    watch.close()
    assert lost.ranks == [2]
    first.close()
    second.close()


def test_on_cpus_the_group_of_the_host_is_kept() -> None:
    host, other = thread_groups(2)

    def never(*_: bytes) -> Any:
        raise AssertionError("a rank on a CPU asks for no GPU")

    collectives = RankCollectives(host)
    collectives.connect(torch.device("cpu"), never, never, Log("x"))
    assert collectives.group is host
    collectives.close()
    with pytest.raises(RankFailed, match="rank 0 has left its group"):
        host.check()
    other.close()
