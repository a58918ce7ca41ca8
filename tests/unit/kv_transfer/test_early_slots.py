"""Slots that wait for their prompt, against a plain list: what each peer holds, what is evicted, and what expires."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.early_slots import EarlyEntry, EarlySlots
from kv_transfer.expiring import ExpiringMap
from kv_transfer.messages import Slots
from tests.unit.kv_transfer.rig import LIMITS, Clock

CAPACITY, SHARE, POOL, TTL = 6, 4, 10, 5.0
ACTIONS = st.tuples(
    st.sampled_from(["put", "put", "put", "take", "take_all", "expire", "forget"]),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 4),
)


def peer(name: str) -> Any:
    """Only what the map reads of a peer."""
    hello = SimpleNamespace(layout=SimpleNamespace(num_pages=POOL))
    return SimpleNamespace(incarnation=name, early=0, early_pages=0, hello=hello)


@settings(max_examples=80)
@given(st.lists(ACTIONS, max_size=40))
def test_every_entry_is_counted_for_its_peer_until_it_leaves(
    actions: list[tuple[str, int, int, int]],
) -> None:
    clock = Clock()
    limits = msgspec.structs.replace(LIMITS, early_slots=CAPACITY, early_slots_per_peer=SHARE, early_ttl=TTL)
    early, peers = EarlySlots(limits, clock), [peer(name) for name in "abc"]
    held = list[EarlyEntry]()  # oldest first

    def leave(expected: list[EarlyEntry], found: list[EarlyEntry]) -> None:
        assert sorted(map(id, found)) == sorted(map(id, expected))
        held[:] = [each for each in held if each not in expected]

    for what, room, number, size in actions:
        one, slots = peers[number], Slots(room, 1, tuple(range(size)), 0, 0)
        of_room = [each for each in held if each.slots.room == room]
        same = [each for each in of_room if each.peer is one]
        if what == "put":
            mine = [each for each in held if each.peer is one]
            pages = sum(len(each.slots.pages) for each in mine)
            assert early.full(one, slots) == (len(mine) >= SHARE or pages + size > POOL)
            if same or early.full(one, slots):
                continue
            evicted = early.put(one, slots)
            new = early.get(room, one.incarnation)
            assert new == EarlyEntry(one, slots, clock.now)
            held.append(new)
            leave(held[: max(len(held) - CAPACITY, 0)], evicted)
        elif what == "take":
            taken = early.take(room, one.incarnation)
            leave(same, [] if taken is None else [taken])
        elif what == "take_all":
            leave(of_room, early.take_all(room))
        elif what == "expire":
            clock.now += size
            leave([each for each in held if each.received_at + TTL <= clock.now], early.expire())
        else:
            early.forget(one)
            held[:] = [each for each in held if each.peer is not one]
        assert len(early) == len(held)
        assert all(early.get(each.slots.room, each.peer.incarnation) is each for each in held)
        for each in peers:
            mine = [entry for entry in held if entry.peer is each]
            assert (each.early, each.early_pages) == (
                len(mine),
                sum(len(entry.slots.pages) for entry in mine),
            )


def test_a_value_that_is_put_again_is_the_youngest() -> None:
    clock = Clock()
    kept: ExpiringMap[str, int] = ExpiringMap(2, TTL, clock)
    assert kept.put("a", 1) == kept.put("b", 2) == []
    clock.now += 1
    assert kept.put("a", 3) == []
    assert kept.put("c", 4) == [2]
    clock.now += TTL - 0.5
    assert kept.expire() == []
    clock.now += 0.5
    assert kept.expire() == [3, 4]
    assert len(kept) == 0
