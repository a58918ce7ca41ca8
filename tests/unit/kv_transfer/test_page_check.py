"""Pages that a GPU still compares when their record has arrived, on a runtime of host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import ChecksumFailed, RecordError, TransferFailed
from kv_transfer.events import Arrived, ReceiverEvent, RoomFailed
from kv_transfer.page_check import PageCheck
from tests.unit.kv_transfer.rig import RECORD
from tests.unit.kv_transfer.test_cuda_ipc import DST, Pair


def arrive(pair: Pair) -> Arrived:
    """Send a room; its record has arrived, and the lane of checksums is held."""
    pair.connect()
    (arrived,) = receive(pair, 1)
    assert isinstance(arrived, Arrived)
    return arrived


def receive(pair: Pair, room: int) -> list[ReceiverEvent]:
    """Send a room while the lane of checksums is held, and return what the receiver says of it."""
    pair.start(room, [3, 5], [9, 2])
    pair.other.lanes[-1].held = True
    pair.sender.finish(room, RECORD)
    pair.sender.poll()
    pair.pump()
    return pair.receiver.poll()


def test_a_room_arrives_before_its_pages_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later launches wait for the checksums, because a step writes to the last page of a prompt."""
    pair = Pair(monkeypatch, checks_later=True)
    arrived = arrive(pair)
    (check,) = arrived.checks
    assert not check.ready()
    assert [mark.lane for mark in pair.other.held_by] == [pair.other.lanes[-1]]
    pair.other.lanes[-1].held = False
    assert check.ready()
    assert check.failure() is None
    assert pair.receiver.counters.arrived == 1
    assert pair.receiver.counters.checksum_failures == 0
    pair.close()


def test_a_damaged_page_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, checks_later=True)
    pump = pair.pump

    def damage() -> None:
        at = DST.planes[-2].offset + 2 * DST.planes[-2].page_bytes
        pair.pool[at] ^= 1
        pump()

    monkeypatch.setattr(pair, "pump", damage)
    (check,) = arrive(pair).checks
    failure = check.failure()
    assert isinstance(failure, ChecksumFailed)
    assert "page 1 of room 1 differs from what was sent" in str(failure)
    assert pair.other.lanes[-1].waited == 1
    assert pair.receiver.counters.checksum_failures == 1
    pair.close()


def test_a_gpu_that_fails_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node ends with the error of the GPU: nothing can be said of its pages."""
    pair = Pair(monkeypatch, checks_later=True)
    (check,) = arrive(pair).checks
    pair.other.lanes[-1].fault = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check.failure()
    assert pair.receiver.counters.checksum_failures == 0
    pair.other.lanes[-1].fault = ""
    pair.close()


def test_memory_that_is_short_costs_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers that were made in advance are in use: the node does not end for lack of another one."""
    pair = Pair(monkeypatch, checks_later=True)
    pair.connect()
    zeros, short = torch.zeros, True

    def none_left(*args: Any, **kwargs: Any) -> torch.Tensor:
        # Only buffers name it: on the CPU they need no pinned memory.
        if short and "pin_memory" in kwargs:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", none_left)
    assert isinstance(receive(pair, 1)[0], Arrived)
    assert isinstance(receive(pair, 2)[0], Arrived)
    failed = receive(pair, 3)[0]
    assert isinstance(failed, RoomFailed)
    assert failed.code == TransferFailed.code
    assert "out of memory" in failed.reason
    assert pair.receiver.counters.record_failures == {"memory": 1}
    short = False
    assert isinstance(receive(pair, 4)[0], Arrived)
    pair.close()


def test_other_causes_are_counted_apart() -> None:
    """`compare` decides what is wrong, and the count follows its cause."""
    causes: list[str] = []

    class Done:
        def ready(self) -> bool:
            return True

        def wait(self) -> None:
            causes.append("waited")

    def compare(found: object) -> None:
        raise RecordError("pages", f"{found} are too few")

    check = PageCheck([7], Done(), compare, causes.append)
    assert str(check.failure()) == "[7] are too few"
    assert causes == ["waited", "pages"]
