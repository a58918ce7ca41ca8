"""When a prefill rank carries out the orders of rank 0: after its own plan, in the order of each room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.kv_cache.pool_spec import PoolSpec
from common.messages.wire import encode
from kv_transfer.events import Arrived, Delivered
from kv_transfer.layer_send import RoomPages
from kv_transfer.ranks.sender_messages import SendPages
from kv_transfer.send_order import SendOrder
from tests.unit.kv_transfer.group_rig import Nodes
from tests.unit.kv_transfer.shares import DST, FAMILIES, SRC, TOKENS, whole_planes

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two ranks on each side; both rooms are granted, and rank 0 gives no orders of its own."""
    made = Nodes(SPEC, (2, 2), "loopback", whole_planes(SPEC, True, 1))
    made.prefill.gives_orders = False
    for room, pages in ((1, DST[:3]), (2, DST[3:])):
        made.prefill.expect(room, made.decode.leader)
        made.decode.open(room, pages, held=0)
    made.turns()
    yield made
    made.close()


def order(nodes: Nodes, room: int, after: int, first: int, pages: list[int]) -> None:
    complete = first + len(pages)
    given = SendOrder(
        room=room, generation=1, after=after, complete=complete, first=first, pages=tuple(pages)
    )
    nodes.prefill.commands.send(encode(SendPages(given)), 1.0)


def test_an_order_waits_for_its_plan_and_for_earlier_orders_of_its_room(nodes: Nodes) -> None:
    service, sender = nodes.prefill.services[0], nodes.prefill.ranks[1].sender
    order(nodes, 1, 2, 0, SRC[:2])
    order(nodes, 1, 1, 2, SRC[2:3])
    order(nodes, 2, 1, 0, SRC[3:4])
    service.turn(0)
    assert sender.counters.pages_written == 0
    assert service.busy
    service.turn(1)  # the second order of room 1 must not overtake the first
    service.turn(1)
    assert sender.counters.pages_written == 1
    service.turn(2)
    service.turn(2)
    assert sender.counters.pages_written == 4
    assert not service.busy


def test_a_break_gets_the_orders_of_the_running_plan(nodes: Nodes) -> None:
    service = nodes.prefill.services[0]
    order(nodes, 1, 4, 0, SRC[:2])
    order(nodes, 2, 5, 0, SRC[3:4])
    service.begin(5)
    assert [each.room for each in service.of_running()] == [2]
    assert service.of_running() == []
    order(nodes, 1, 5, 2, SRC[2:3])  # after an order that waits for the plan before
    assert service.of_running() == []
    service.turn(4)
    assert [each.first for each in service.of_running()] == [2]


def test_pages_leave_layer_by_layer_on_a_rank(nodes: Nodes) -> None:
    service, sender = nodes.prefill.services[0], nodes.prefill.ranks[1].sender
    service.begin(7)
    layers = sender.follow()
    layers.add([])
    layers.stored(0)
    order(nodes, 2, 7, 0, SRC[3:4])
    layers.add([RoomPages(each.room, each.pages, each.first) for each in service.of_running()])
    layers.stored(1)
    layers.close()
    service.turn(6)
    assert sender.counters.pages_written == 0
    order(nodes, 2, 7, 1, [])  # the forward has ended on rank 0, which completes page 0
    service.turn(6)
    assert sender.counters.pages_written == 0
    service.turn(7)
    service.turn(7)
    assert (sender.counters.pages_written, sender.counters.pages_by_layer) == (1, 1)


def test_grants_are_reported_at_breaks(nodes: Nodes) -> None:
    """A decode node often grants just after a prompt has started."""
    nodes.prefill.expect(3, nodes.decode.leader)
    nodes.decode.open(3, [8], held=0)
    nodes.turns(4, skip=["p0", "p1"])
    nodes.prefill.ranks[0].listen()
    assert nodes.prefill.node.slots(3) is None
    nodes.prefill.services[0].begin(1)
    assert nodes.prefill.services[0].of_running() == []
    assert nodes.prefill.node.slots(3) is not None


def test_orders_of_ended_rooms_are_dropped(nodes: Nodes) -> None:
    service = nodes.prefill.services[0]
    order(nodes, 1, 2, 0, SRC[:2])
    service.turn(0)
    nodes.decode.node.abort(1, "gone")
    nodes.turns()
    service.turn(2)
    assert not service.busy
    assert nodes.prefill.ranks[1].sender.counters.pages_written == 0


def test_rank_0_sleeps_while_another_rank_writes() -> None:
    """The report of that rank wakes it."""
    nodes = Nodes(SPEC, (2, 2), "loopback", whole_planes(SPEC, True, 1))
    nodes.prefill.expect(1, nodes.decode.leader)
    nodes.decode.open(1)
    nodes.turns(20, skip=["p1"])
    assert nodes.prefill_count(Delivered) == 0
    assert nodes.prefill.node.poll_interval is None
    nodes.turns()
    assert nodes.decode_count(Arrived) == 1
    nodes.close()
