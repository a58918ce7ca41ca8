"""A turn of the prefill node does not visit prompts that wait for their turn or for slots."""

from __future__ import annotations

import secrets
from collections import Counter

import pytest

from kv_transfer.events import Delivered, TransferLost
from kv_transfer.messages import ToReceiver
from kv_transfer.outbound import Outbound
from tests.fakes.loopback import Fabric
from tests.unit.kv_transfer.rig import Clock, Decode, Prefill, same_pages, send_all


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Counts, per room, how often it was advanced."""
    counted = Counter[int]()
    advance = Outbound.advance

    def counting(self: Outbound, now: float) -> list[ToReceiver]:
        counted[self.room] += 1
        return advance(self, now)

    monkeypatch.setattr(Outbound, "advance", counting)
    return counted


def ends() -> tuple[Clock, Prefill, Decode]:
    clock = Clock()
    fabric = Fabric(clock)
    incarnation = secrets.token_hex(16)
    prefill = Prefill(clock, fabric.sender("p"))
    decode = Decode(clock, fabric.receiver(incarnation), incarnation=incarnation)
    decode.connect(prefill)
    return clock, prefill, decode


def test_a_thousand_waiting_prompts_cost_nothing(looked_at: Counter[int]) -> None:
    clock, prefill, decode = ends()
    for room in range(1, 1001):
        prefill.sender.expect(room, clock.now + 60)
    decode.receiver.open(7, (prefill.incarnation,), [3, 4], 0, clock.now + 60)
    for _ in range(20):
        prefill.poll()
        decode.poll()
    assert not looked_at
    send_all(prefill, 7, [5, 6])
    events = [event for _ in range(5) for event in (*prefill.poll(), *decode.poll())]
    assert Delivered(7) in events
    assert same_pages(prefill, [5, 6], decode, [3, 4])
    assert set(looked_at) == {7}


def test_prompts_that_wait_too_long_fail_in_time(looked_at: Counter[int]) -> None:
    clock, prefill, _ = ends()
    for room in range(1, 101):
        prefill.sender.expect(room, clock.now + room)
    clock.now += 40.0
    lost = [event for event in prefill.poll() if isinstance(event, TransferLost)]
    assert [event.room for event in lost] == list(range(1, 41))
    assert set(looked_at) == set(range(1, 41))
    assert prefill.sender.active == 60
    assert not prefill.poll()


def test_alarms_of_rooms_that_ended_in_time_are_forgotten() -> None:
    clock, prefill, decode = ends()
    for room in range(1, 501):
        prefill.sender.expect(room, clock.now + 600)
        decode.receiver.open(room, (prefill.incarnation,), [1], 0, clock.now + 600)
        while prefill.sender.slots(room) is None:
            prefill.poll()
            decode.poll()
        send_all(prefill, room, [2])
        while prefill.sender.active:
            prefill.poll()
            decode.poll()
        decode.poll()
        decode.receiver.close(room)
    assert prefill.sender.counters.delivered == 500
    assert len(prefill.sender.alarms) <= 70
