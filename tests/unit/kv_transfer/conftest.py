"""For all tests of transfers."""

from __future__ import annotations

import pytest

from tests.fakes.waiting import PATIENCE


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sender wait for threads of this process longer than for a network: they may be kept from running."""
    monkeypatch.setattr("kv_transfer.transport.nixl.liveness.CONNECT_SECONDS", PATIENCE)
    monkeypatch.setattr("kv_transfer.transport.nixl.lookup.LOOKUP_SECONDS", PATIENCE)
