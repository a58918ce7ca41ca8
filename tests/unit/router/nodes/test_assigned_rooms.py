"""What placement sees of the prompts on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes.assigned_rooms import AssignedRooms
from router.nodes.prompt_times import PromptTime

STEPS = st.lists(st.tuples(st.sampled_from(["add", "computed", "remove"]), st.integers(1, 5)))


@given(STEPS)
def test_one_prompt_has_a_forward_of_its_own_and_the_others_share(steps: list[tuple[str, int]]) -> None:
    rooms, left = AssignedRooms(), dict[int, int]()
    for number, (step, room) in enumerate(steps):
        if step == "add" and room not in left:
            rooms.add(room, number, PromptTime(0.1 * number + 3.0, 0.1 * number))
            left[room] = number
        elif step == "computed":
            rooms.computed(room)
            left.update({room: 0} if room in left else {})
        elif step == "remove":
            rooms.remove(room)
            left.pop(room, None)
        assert rooms.tokens == sum(left.values())
        own_forward = 3.0 if any(left.values()) else 0.0
        assert rooms.ms == pytest.approx(0.1 * rooms.tokens + own_forward)
        assert {each: rooms.left(each) for each in rooms} == left


def test_a_room_that_is_not_there_has_nothing_left() -> None:
    """A node may name the room of a request whose prompt it has already handed over."""
    assert AssignedRooms().left(7) == 0
