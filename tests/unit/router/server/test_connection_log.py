"""Connections that are closed at a limit are logged, a flood of them as a count."""

from __future__ import annotations

import pytest

from common.observability.bounded_log import FIRST, WINDOW
from common.observability.logs import Log
from router.http import flushed_logs
from router.server.connection_log import ConnectionLog
from tests.fakes.clock import Clock
from tests.fakes.waiting import eventually


async def test_a_flood_is_counted_also_if_nothing_follows_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushed_logs, "WINDOW", 0.0)
    clock = Clock()
    log = ConnectionLog(Log("router"), clock)
    for _ in range(FIRST + 3):
        log.note("10.0.0.7", "it has too many")
    assert [each.getMessage() for each in caplog.records] == ["closed a new connection"] * FIRST
    clock.now += WINDOW
    await eventually(lambda: len(caplog.records) > FIRST)
    fields = caplog.records[-1].fields  # type: ignore[attr-defined]
    assert (fields["count"], fields["peers"]) == (3, {"10.0.0.7": 3})
