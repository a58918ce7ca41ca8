"""What placement sees of the prompts on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.identity import NodeLoad, OtherRouters
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


def test_requests_of_other_routers_count_as_the_node_reports_them() -> None:
    rooms = AssignedRooms()
    load = NodeLoad(queued_tokens=400, queued_ms=40.0)
    rooms.heard(load, OtherRouters(routers=1, requests=3, tokens=300))
    assert (rooms.expected, rooms.ms) == (3, pytest.approx(30.0))
    rooms.heard(NodeLoad(), OtherRouters(routers=1))
    assert (rooms.expected, rooms.ms) == (0, 0.0)


def test_other_routers_are_expected_to_place_as_many_requests_until_the_next_heartbeat() -> None:
    """They see the same idle node. Once the node has reported what they did place, that counts."""
    rooms = AssignedRooms()
    rooms.heard(NodeLoad(), OtherRouters(routers=3))
    rooms.add(1, 10, PromptTime(2.0, 1.0))
    rooms.add(2, 10, PromptTime(2.0, 1.0))
    assert (rooms.expected, rooms.ms) == (2 + 3 * 2, pytest.approx(3.0 + 3 * 2.0))
    rooms.heard(NodeLoad(queued_ms=4.0, queued_tokens=40), OtherRouters(routers=3, requests=1, tokens=20))
    assert (rooms.expected, rooms.ms) == (2 + 1, pytest.approx(3.0 + 2.0))
    assert len(rooms) == 2


@pytest.mark.parametrize("routers", [2, 16])
def test_routers_that_see_only_heartbeats_fill_nodes_evenly(routers: int) -> None:
    """Each places a request in turn on the node with the fewest expected; the nodes report after every 4 of each."""
    views = [[AssignedRooms() for _ in range(4)] for _ in range(routers)]
    placed = [[0] * 4 for _ in range(routers)]
    worst = 0
    for turn in range(64):
        if turn % 4 == 0:
            on_node = [sum(column) for column in zip(*placed, strict=True)]
            worst = max(worst, max(on_node) - min(on_node))
            for view, own in zip(views, placed, strict=True):
                for node, rooms in enumerate(view):
                    others = on_node[node] - own[node]
                    rooms.heard(NodeLoad(), OtherRouters(routers=routers - 1, requests=others))
        for router, view in enumerate(views):
            chosen = min(range(4), key=lambda node: (view[node].expected, (node + router) % 4))
            view[chosen].add(1000 * turn + router, 0)
            placed[router][chosen] += 1
    assert worst <= routers
