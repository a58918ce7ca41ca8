"""What the rooms of a receiver hold: pages, state slots and record slots, each for one room at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InternalError, Overloaded
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.inbound import Link
from kv_transfer.inbound_room import InboundRoom, InboundRooms

PAGES, SLOTS, RECORDS = 8, 3, 4


def rooms(num_slots: int = SLOTS) -> InboundRooms:
    layout: Any = SimpleNamespace(num_pages=PAGES, num_slots=num_slots)
    return InboundRooms(layout, RECORDS)


def link(rank: int = 0) -> Link:
    return Link(f"{rank:032x}", lambda frame: None, 0.0, ranks=(rank, 2))


def opened(made: InboundRooms, room: int, pages: list[int], state_slot: int = 0, *links: Link) -> InboundRoom:
    return made.open(room, links or (link(),), pages, 0, None, state_slot, 10.0)


def test_a_state_slot_belongs_to_one_room_until_its_memory_is_released() -> None:
    made = rooms()
    first = opened(made, 1, [1], 2)
    for slot in (2, 0, SLOTS, -1):
        with pytest.raises(
            InternalError, match=f"room 2: state slot {slot} of 3 is in use, or does not exist"
        ):
            opened(made, 2, [2], slot)
    assert 2 not in made
    opened(made, 3, [3], 1)
    made.release_memory(first)
    made.remove(first)
    opened(made, 4, [1], 2)


def test_a_model_without_states_has_no_state_slots() -> None:
    made = rooms(num_slots=0)
    with pytest.raises(InternalError, match="state slot 1 of 0"):
        opened(made, 1, [1], 1)
    for room in (1, 2):
        opened(made, room, [room])


@pytest.mark.parametrize("pages", [[3, 3], [1, PAGES], [-1, 2], [2, 5]])
def test_pages_of_another_room_or_of_no_pool_are_refused(pages: list[int]) -> None:
    made = rooms(num_slots=0)
    held = opened(made, 1, [5, 7])
    with pytest.raises(InternalError, match="room 2: a page"):
        opened(made, 2, pages)
    assert len(made) == 1
    made.release_memory(held)
    made.remove(held)
    assert made.holds_nothing


def test_each_part_has_a_record_slot_and_a_generation_of_its_own() -> None:
    made = rooms(num_slots=0)
    whole = opened(made, 1, [1], 0, link(0), link(1))
    other = opened(made, 2, [2], 0, link(0))
    parts = [*whole.parts, *other.parts]
    assert len({part.record_slot for part in parts}) == len({part.generation for part in parts}) == 3
    with pytest.raises(Overloaded, match="all 4 record slots are in use"):
        opened(made, 3, [3], 0, link(0), link(1))
    made.complete(whole, [part.link for part in whole.parts], 10.0)
    assert len(whole.parts) == 2, "no link twice"
    for each in (whole, other):
        made.release_memory(each)
        made.remove(each)
    assert made.holds_nothing


def test_the_record_is_that_of_the_first_rank_whatever_came_first() -> None:
    whole = opened(rooms(num_slots=0), 1, [1], 0, link(1), link(0))
    for part in whole.parts:
        part.record = HandoffRecord(first_token=100 + part.link.ranks[0], num_tokens=1)
    assert whole.record.first_token == 100
    assert whole.checks == (), "none of the parts has a comparison under way"
