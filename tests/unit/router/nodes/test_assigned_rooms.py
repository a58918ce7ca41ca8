"""What placement sees of the prompts on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes.assigned_rooms import AssignedRooms

STEPS = st.lists(st.tuples(st.sampled_from(["add", "computed", "remove"]), st.integers(1, 5)))


@given(STEPS)
def test_the_sum_is_that_of_the_rooms(steps: list[tuple[str, int]]) -> None:
    rooms, left = AssignedRooms(), dict[int, int]()
    for number, (step, room) in enumerate(steps):
        if step == "add" and room not in left:
            rooms.add(room, number, 0.1 * number)
            left[room] = number
        elif step == "computed":
            rooms.computed(room)
            left.update({room: 0} if room in left else {})
        elif step == "remove":
            rooms.remove(room)
            left.pop(room, None)
        assert rooms.tokens == sum(left.values())
        assert rooms.ms == pytest.approx(0.1 * rooms.tokens)
        assert {each: rooms.left(each) for each in rooms} == left


def test_a_room_that_is_not_there_has_nothing_left() -> None:
    """A node may name the room of a request whose prompt it has already handed over."""
    assert AssignedRooms().left(7) == 0
