"""Requests that only the end of a quarantine could serve leave after a bounded wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from decode_node.quarantine_wait import MAX_SECONDS, QuarantineWait
from decode_node.queues import Queues
from decode_node.request import DecodeRequest

PREFILL = NodeRef(name="p", role="prefill", incarnation="7" * 32)


def request(room: int) -> DecodeRequest:
    return DecodeRequest(
        room=room,
        request_id=f"r{room}",
        prompt=[room],
        emitted=0,
        sampling=SamplingParams(max_tokens=5),
        prefill=PREFILL,
        received=0.0,
        deadline=99.0,
    )


def fill(queues: Queues) -> None:
    """Leave one retracted and one new request waiting, and a third in quarantine."""
    for each in (queues.retracted, queues.waiting, queues.arrived, queues.running, queues.quarantined):
        each.clear()
    queues.retracted.append(request(1))
    queues.waiting.append(request(2))
    queues.quarantined[3] = request(3)


def stuck() -> Queues:
    queues = Queues()
    fill(queues)
    return queues


def overdue(wait: QuarantineWait, now: float, frees_pages: bool = False) -> list[int]:
    return [each.room for each in wait.overdue(frees_pages, now)]


def test_what_waits_for_a_quarantine_leaves_after_a_while() -> None:
    wait = QuarantineWait(stuck())
    assert overdue(wait, 10.0) == []
    assert overdue(wait, 10.0 + MAX_SECONDS) == []
    assert overdue(wait, 10.1 + MAX_SECONDS) == [1, 2]
    assert overdue(wait, 10.2 + MAX_SECONDS) == [], "the next ones have a whole wait of their own"
    assert overdue(wait, 10.3 + 2 * MAX_SECONDS) == [1, 2]


@pytest.mark.parametrize(
    "hope",
    [
        pytest.param(lambda queues: queues.running.update({4: request(4)}), id="a running request"),
        pytest.param(lambda queues: queues.arrived.append(request(4)), id="an arrived prompt"),
        pytest.param(lambda queues: queues.quarantined.clear(), id="no quarantine"),
        pytest.param(lambda queues: (queues.waiting.clear(), queues.retracted.clear()), id="nobody waits"),
    ],
)
def test_the_wait_begins_again_once_pages_may_come_from_elsewhere(hope: Callable[[Queues], object]) -> None:
    queues = stuck()
    wait = QuarantineWait(queues)
    assert overdue(wait, 10.0) == []
    hope(queues)
    assert overdue(wait, 11.0 + MAX_SECONDS) == []
    fill(queues)
    assert overdue(wait, 12.0 + MAX_SECONDS) == []
    assert overdue(wait, 11.9 + 2 * MAX_SECONDS) == []
    assert overdue(wait, 12.1 + 2 * MAX_SECONDS) == [1, 2]


def test_pages_of_retracted_requests_that_become_free_are_waited_for() -> None:
    wait = QuarantineWait(stuck())
    assert overdue(wait, 10.0) == []
    assert overdue(wait, 11.0 + MAX_SECONDS, frees_pages=True) == []
    assert overdue(wait, 12.0 + MAX_SECONDS) == []
