"""Copies over CUDA IPC that are launched before the forward has ended, on a runtime of host memory: whole rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer.events import Arrived, Delivered, PagesFree, SlotsGranted, TransferLost
from kv_transfer.layer_send import RoomPages
from tests.unit.kv_transfer.rig import RECORD
from tests.unit.kv_transfer.test_cuda_ipc import Pair


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(monkeypatch)
    yield made
    made.close()


def test_queued_copies_need_no_launch_once_the_forward_has_ended(pair: Pair) -> None:
    """Their copies wait for the computing stream. The record leaves as soon as the node has read the first token."""
    pair.connect()
    lane, layers = pair.cuda.lanes[-2:]
    pair.sender.expect(1)
    pair.receiver.open(1, (pair.own,), [9, 2], 0)
    assert pair.sender.poll()[-1:] == [SlotsGranted(1)]
    assert pair.sending.waits_for_stream
    layers.held, lane.launch_fault = True, "nothing may be launched"
    send = pair.sender.follow()
    send.add([RoomPages(1, [3, 5], 0)])
    send.queue_rest()
    send.close()
    assert layers.events == [1], "one copy, after the forward"
    assert pair.sender.poll() == []
    layers.held = False
    assert pair.sender.poll() == [], "the forward is not known to have ended well"
    assert pair.to_decode == []
    pair.sender.complete(1, 2)
    pair.sender.finish(1, RECORD)
    assert len(pair.to_decode) == 2, "the pages and the record, without another look"
    assert pair.sender.poll() == [Delivered(1)]
    pair.pump()
    (arrived,) = pair.receiver.poll()
    assert isinstance(arrived, Arrived)
    assert len(arrived.record.checksums) == 2 * 8
    assert all(pair.equal(a, b) for a, b in zip([3, 5], [9, 2], strict=True))
    counters = pair.sender.counters
    assert (counters.pages_written, counters.pages_by_layer) == (2, 0)


def test_an_abort_waits_for_queued_copies(pair: Pair) -> None:
    """Their ticket covers other rooms as well, so it cannot be cancelled: pages are free once the copy is done."""
    pair.connect()
    layers = pair.cuda.lanes[-1]
    pair.sender.expect(1)
    pair.receiver.open(1, (pair.own,), [9], 0)
    pair.sender.poll()
    layers.held = True
    send = pair.sender.follow()
    send.add([RoomPages(1, [3], 0)])
    send.queue_rest()
    send.close()
    pair.receiver.abort(1, "the client went away")
    assert pair.sender.poll() == []
    pair.pump()
    assert pair.receiver.poll() == []
    layers.held = False
    (lost,) = pair.sender.poll()
    assert isinstance(lost, TransferLost)
    pair.pump()
    assert pair.receiver.poll() == [PagesFree(1, (9,))]
