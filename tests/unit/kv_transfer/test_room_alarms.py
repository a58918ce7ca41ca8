"""When rooms that wait are looked at."""

from __future__ import annotations

from kv_transfer.outbound_room import OutboundRoom
from kv_transfer.room_alarms import RoomAlarms
from tests.unit.kv_transfer.rig import LIMITS
from tests.unit.kv_transfer.test_faults import Rig


def waiting(rig: Rig, *numbers: int) -> list[OutboundRoom]:
    for number in numbers:
        rig.sender.expect(number)
    return [rig.sender.rooms[number] for number in numbers]


def test_a_room_whose_alarm_is_set_again_is_due_in_the_next_call() -> None:
    """A room that is still due after it was looked at must not keep the loop of the node busy."""
    rig = Rig()
    rooms = waiting(rig, 1, 2)
    alarms = RoomAlarms(rig.sender.rooms)
    alarms.add(*rooms)
    now = rig.clock.now + LIMITS.slots_timeout
    for _ in range(2):
        seen = []
        for room in alarms.due(now):
            seen.append(room)
            alarms.add(room)
        assert seen == rooms


def test_rooms_that_have_ended_are_not_due() -> None:
    rig = Rig()
    first, second = waiting(rig, 1, 2)
    alarms = RoomAlarms(rig.sender.rooms)
    alarms.add(first, second)
    rig.sender.cancel(1, "cancelled", "the client is gone")
    assert alarms.due(rig.clock.now) == []
    assert alarms.due(rig.clock.now + LIMITS.slots_timeout) == [second]
