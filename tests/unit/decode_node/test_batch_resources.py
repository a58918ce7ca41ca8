"""Who gets pages for the next step, and who leaves the batch if they run out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.forward.rotary_places import OneAxis
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import RadixCache
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.observability.event_log import EventLog
from decode_node.batch_resources import BatchResources
from decode_node.batch_rows import BatchRows
from decode_node.host_tier import NoDecodeTier
from decode_node.queues import Queues
from decode_node.request import DecodeRequest
from decode_node.retraction import Retraction
from decode_node.step_rules import StepRules

PAGE, POOL = 4, 4  # tokens, pages
PREFILL = NodeRef(name="p", role="prefill", incarnation="7" * 32)


class Tier(NoDecodeTier):
    frees_pages = False

    def __init__(self) -> None:
        self.kept: list[int] = []

    def store(self, request: DecodeRequest) -> None:
        self.kept.append(request.room)


class Events(EventLog):
    def __init__(self) -> None:
        self.added: list[tuple[str, int]] = []

    def add(self, event: str, room: int = 0, **fields: object) -> None:
        self.added.append((event, room))


class Rig:
    """Four pages, three rows, a batch of two, and memory for backups."""

    def __init__(self) -> None:
        self.space, self.rows = PageSpace(PAGE, POOL + 1, RadixCache(PAGE)), BatchRows(3)
        self.queues, self.tier, self.events = Queues(), Tier(), Events()
        self.retraction = Retraction(self.space, self.rows, OneAxis(), 1000, lambda pages: 10 * pages)
        limits: Any = SimpleNamespace(reserved_tokens=1, max_running=2)
        scheduling: Any = SimpleNamespace(
            space=self.space,
            rows=self.rows,
            retraction=self.retraction,
            rules=StepRules(),
            limits=limits,
            tier=self.tier,
        )
        self.resources = BatchResources(self.queues, scheduling, self.events)

    def lease(self, room: int, tokens: int) -> DecodeRequest:
        """Return a request whose prompt has arrived, with its first token; the next step writes the KV of that."""
        request = DecodeRequest(
            room=room,
            request_id=f"r{room}",
            prompt=[room] * tokens,
            emitted=0,
            sampling=SamplingParams(max_tokens=50),
            prefill=PREFILL,
            received=0.0,
            deadline=9.0,
            output=[5],
            launched=1,
        )
        request.lease = self.resources.try_lease(request)
        return request

    def arrive(self, room: int, tokens: int) -> DecodeRequest:
        """The same for a request that was admitted when there was more room."""
        request = self.lease(room, tokens)
        if request.lease is None:
            keys = self.space.keys(request.prompt)
            request.lease = self.space.lease(keys, self.space.pages_for(tokens), 0)
        self.queues.arrived.append(request)
        self.resources.start_arrived()
        return request

    def batch(self) -> list[int]:
        return [request.room for request in self.resources.batch().requests]


def test_a_prompt_leaves_the_pages_that_running_requests_need_next() -> None:
    rig = Rig()
    assert rig.lease(9, 16).lease is not None, "nobody else holds pages"
    rig = Rig()
    rig.arrive(1, 7)
    assert rig.lease(2, 4).lease is None, "one page has to be left for each of the two"
    assert rig.space.free_pages == 2
    rig.queues.running.clear()
    assert rig.lease(2, 4).lease is not None


@pytest.mark.parametrize("freeing", ["nothing", "a tier", "a save"])
def test_a_request_is_retracted_unless_pages_become_free(freeing: str) -> None:
    """While copies end that free pages, a request that lacks one only skips the step."""
    rig = Rig()
    other = rig.arrive(3, 4)
    if freeing == "a save":
        del rig.queues.running[3]
        assert rig.retraction.save(other)
    elif freeing == "a tier":
        rig.tier.frees_pages = True
    rig.queues.running.pop(3, None)
    first, second = rig.arrive(1, 8), rig.arrive(2, 3)
    assert rig.space.free_pages == 0
    assert rig.batch() == [2]
    assert [request.room for request in (first, second) if request.retract] == [1] * (freeing == "nothing")
    if freeing == "nothing":
        assert rig.batch() == [2], "one at a time"
        assert not second.retract


def test_a_row_is_needed_to_join_the_batch() -> None:
    rig = Rig()
    for room in (1, 2, 3):
        rig.arrive(room, 1)
    assert list(rig.queues.running) == [1, 2], "a batch of two"
    del rig.queues.running[1]
    rig.rows.take()
    rig.resources.start_arrived()
    assert list(rig.queues.running) == [2], "no row is free"
    assert [request.room for request in rig.queues.arrived] == [3]


@pytest.mark.parametrize(
    ("trusted", "checked", "kept"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_pages_that_can_be_trusted_stay_in_the_cache(trusted: bool, checked: bool, kept: bool) -> None:
    rig = Rig()
    request = rig.arrive(1, 9)
    check: Any = SimpleNamespace()
    request.trusted, request.checks = trusted, () if checked else (check,)
    request.in_flight = 1
    rig.resources.leave(request)
    assert request.lease is not None, "a step still writes to its pages"
    request.in_flight = 0
    for _ in range(2):
        rig.resources.leave(request)
    assert (request.lease, request.row, rig.rows.free) == (None, 0, 3)
    assert rig.tier.kept == [1] * kept
    assert rig.space.cache.cached_pages == 2 * kept
    assert (rig.space.leased_pages, rig.events.added[-1]) == (0, ("freed", 1))
    assert rig.events.added.count(("freed", 1)) == 1
