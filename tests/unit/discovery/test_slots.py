"""Links to routers that come and go: each router has one link, and no connection ends because a list has changed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.discovery.slots import EPISODE_SECONDS, HOLD_SECONDS, SlotTable
from tests.fakes.clock import Clock


def test_each_slot_dials_another_router() -> None:
    table = SlotTable(3, Clock())
    assert table.dial(0) is None
    table.replace(["a", "b", "a"])
    assert [table.dial(slot) for slot in (2, 0, 1)] == ["a", "b", None]
    assert [table.dial(slot) for slot in (0, 1, 2)] == ["b", None, "a"]


def test_more_routers_than_slots_leave_some_without_a_link() -> None:
    table = SlotTable(1, Clock())
    table.replace(["a", "b"])
    assert table.dial(0) == "a"
    table.replace(["b", "a"])
    assert table.dial(0) == "a", "the router stays while it is listed"


def test_a_router_that_is_listed_again_keeps_its_slot() -> None:
    clock = Clock()
    table = SlotTable(2, clock)
    table.replace(["a"])
    assert table.dial(0) == "a"
    table.replace(["b"])
    assert table.dial(1) == "b"
    table.replace(["b", "a"])
    assert (table.dial(0), table.dial(1)) == ("a", "b")


def test_a_router_that_is_gone_makes_room_after_a_while() -> None:
    clock = Clock()
    table = SlotTable(1, clock)
    table.replace(["a"])
    assert table.dial(0) == "a"
    clock.now += 3600.0  # connected meanwhile
    table.replace(["b"])
    dialled = []
    for _ in range(int(HOLD_SECONDS) + 2):
        dialled.append(table.dial(0))
        clock.now += 1.0
    assert dialled[: int(HOLD_SECONDS)] == ["a"] * int(HOLD_SECONDS), "it may drain, and is not listed then"
    assert dialled[-1] == "b"


def test_a_connection_that_was_made_again_begins_a_new_wait() -> None:
    clock = Clock()
    table = SlotTable(1, clock)
    table.replace(["a"])
    table.dial(0)
    table.replace(["b"])
    for _ in range(3):
        assert table.dial(0) == "a"
        clock.now += HOLD_SECONDS + EPISODE_SECONDS


class Slots(RuleBasedStateMachine):
    """Lists change and links dial in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = SlotTable(3, self.clock)
        self.dialled: dict[int, str | None] = {}

    @rule(listed=st.lists(st.sampled_from("abcde"), unique=True))
    def change(self, listed: list[str]) -> None:
        self.table.replace(listed)

    @rule(slot=st.integers(0, 2), seconds=st.sampled_from([0.0, 1.0, 9.0, 40.0]))
    def dial(self, slot: int, seconds: float) -> None:
        self.clock.now += seconds
        self.dialled[slot] = self.table.dial(slot)

    @invariant()
    def no_two_slots_dial_one_router(self) -> None:
        taken = [address for address in self.dialled.values() if address is not None]
        assert len(set(taken)) == len(taken)


Slots.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_slots = Slots.TestCase
