"""Reservations: what a waiting request takes, what comes back if it is refused, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidRequest, NodeLost, Overloaded, RequestError, Unavailable
from common.kv_cache.page_space import PageLease, PageSpace
from common.kv_cache.radix_cache import RadixCache
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.messages.router_inbox import Failed
from common.observability.event_log import EventLog
from decode_node.host_tier import FoundPrefix, NoDecodeTier
from decode_node.queues import Queues
from decode_node.request import DecodeRequest
from decode_node.reservations import Reservations

PAGE, POOL = 4, 8  # tokens, pages
PREFILL = NodeRef(name="p", role="prefill", incarnation="7" * 32)


class Tier(NoDecodeTier):
    """Finds so many pages of every prompt in host memory."""

    def __init__(self) -> None:
        self.pages = 0
        self.begun: list[int] = []
        self.given_up = 0

    def find(self, request: DecodeRequest, lease: PageLease) -> FoundPrefix:
        return FoundPrefix(pages=self.pages)

    def fetch(self, request: DecodeRequest, found: FoundPrefix) -> None:
        assert request.lease is not None
        self.begun.append(request.room)

    def release(self, found: FoundPrefix) -> None:
        self.given_up += 1


class Events(EventLog):
    def __init__(self) -> None:
        self.added: list[dict[str, object]] = []

    def add(self, event: str, room: int = 0, **fields: object) -> None:
        self.added.append({"event": event, "room": room, **fields})


class Rig:
    """Reservations over a real page space; the receiver raises `error` if there is one."""

    def __init__(self, max_transferring: int = 3) -> None:
        self.space = PageSpace(PAGE, POOL + 1, RadixCache(PAGE))
        self.queues, self.tier, self.events = Queues(), Tier(), Events()
        self.error: RequestError | None = None
        self.opened: list[tuple[int, Sequence[int], int]] = []
        self.sent: list[Any] = []
        self.lost: list[str] = []
        self.report = SimpleNamespace(prompt_tokens=0, cached_tokens=0)
        limits = SimpleNamespace(max_transferring=max_transferring, skip_ahead=2)
        scheduling: Any = SimpleNamespace(limits=limits, tier=self.tier)
        resources: Any = SimpleNamespace(try_lease=self.lease)
        receiver: Any = SimpleNamespace(open=self.open)
        peers: Any = SimpleNamespace(lost=self.lost.append)
        report: Any = self.report
        self.reservations = Reservations(
            self.queues, scheduling, resources, receiver, peers, report, self.events
        )

    def lease(self, request: DecodeRequest) -> PageLease | None:
        keys = self.space.keys(request.prompt)
        return self.space.lease(keys, self.space.pages_for(len(keys)), len(keys) - 1)

    def open(
        self, room: int, peers: Sequence[str], pages: Sequence[int], held: int, deadline: float, slot: int
    ) -> int:
        assert (list(peers), deadline, slot) == ([PREFILL.incarnation], 9.0, 0)
        if self.error is not None:
            raise self.error
        self.opened.append((room, tuple(pages), held))
        return 40 + room

    def wait(self, room: int, prompt: Sequence[int]) -> DecodeRequest:
        router: Any = SimpleNamespace(send=self.sent.append)
        sampling = SamplingParams(max_tokens=9)
        request = DecodeRequest(room, f"r{room}", prompt, 0, sampling, PREFILL, 0.0, 9.0, router)
        self.queues.waiting.append(request)
        return request

    def admit(self) -> list[int]:
        self.reservations.admit(1.5)
        return list(self.queues.transferring)


def test_what_the_node_has_already_is_not_asked_for() -> None:
    rig = Rig()
    cached = rig.space.lease(rig.space.keys(range(8)), 2, 0)
    assert cached is not None
    cached.commit(rig.space.keys(range(8)))
    cached.release()
    first = rig.wait(1, range(10))
    assert rig.admit() == [1]
    assert first.lease is not None
    assert rig.opened == [(1, tuple(first.lease.pages[2:]), 2)]
    assert (rig.report.prompt_tokens, rig.report.cached_tokens) == (10, 8)
    assert first.stages == {"reserved": 1.5}
    rig.tier.pages = 3
    second = rig.wait(2, range(16))
    assert rig.admit() == [1, 2]
    assert second.lease is not None
    assert rig.opened[1:] == [(2, tuple(second.lease.pages[3:]), 3)], "host memory has more than the pool"
    assert rig.tier.begun == [1, 2]
    assert (rig.report.prompt_tokens, rig.report.cached_tokens) == (26, 16)
    assert rig.events.added[-1] == {
        "event": "opened",
        "room": 2,
        "generation": 42,
        "pages": second.lease.pages[3:],
        "held": second.lease.pages[:3],
    }
    assert not rig.queues.waiting


def test_without_a_record_slot_a_request_waits_and_holds_nothing() -> None:
    rig = Rig()
    request = rig.wait(1, range(10))
    rig.error = Overloaded("all record slots are in use")
    assert rig.admit() == []
    assert (list(rig.queues.waiting), rig.sent, rig.lost) == ([request], [], [])
    assert (rig.space.free_pages, rig.tier.given_up, rig.tier.begun) == (POOL, 1, [])
    rig.error = None
    assert rig.admit() == [1]


@pytest.mark.parametrize(
    ("error", "code", "lost"),
    [
        (Unavailable("the peer is not connected"), NodeLost.code, [PREFILL.incarnation]),
        (InvalidRequest("room 1 is active already", param="room"), InvalidRequest.code, []),
    ],
)
def test_a_transfer_that_cannot_be_opened_fails_its_request_only(
    error: RequestError, code: str, lost: list[str]
) -> None:
    """Its router hears why, its pages are free, and a lost peer will be greeted again."""
    rig = Rig()
    rig.wait(1, range(10))
    rig.error = error
    assert rig.admit() == []
    assert (rig.sent, rig.lost) == ([Failed(room=1, code=code, message=str(error))], lost)
    assert not rig.queues.waiting
    assert rig.space.free_pages == POOL
    assert (rig.report.prompt_tokens, rig.report.cached_tokens, rig.events.added) == (0, 0, [])


def test_transfers_are_bounded_and_retracted_requests_go_first() -> None:
    rig = Rig(max_transferring=2)
    requests = [rig.wait(room, [room] * 4) for room in (1, 2, 3)]
    rig.queues.retracted.append(requests[0])
    assert rig.admit() == []
    rig.queues.retracted.clear()
    rig.queues.arrived.append(requests[0])
    assert rig.admit() == [1], "one that has arrived counts too"
    rig.queues.arrived.clear()
    assert rig.admit() == [1, 2]
    assert rig.admit() == [1, 2]
