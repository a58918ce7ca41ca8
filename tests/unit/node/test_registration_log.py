"""A node's log says which routers serve it, and why none does."""

from __future__ import annotations

from typing import Any

import pytest

from common.node.registration_log import FIRST_SECONDS, MAX_ROUTERS, REPEAT_SECONDS, RegistrationLog
from common.observability.logs import Log


class Link:
    """The part of a RouterLink that the log asks."""

    def __init__(self, number: int) -> None:
        self.address = f"tcp://router-{number}:5600"
        self.registered = False

    def unregistered_because(self) -> str:
        return "nobody accepts a connection there"


class Lines:
    """What the log says of some links."""

    def __init__(self, caplog: pytest.LogCaptureFixture, links: int) -> None:
        self.links: list[Any] = [Link(number) for number in range(links)]
        self._caplog = caplog
        self._log = RegistrationLog(Log("node"), 0.0)

    def at(self, now: float) -> list[tuple[str, Any]]:
        """Return the new lines, each with its field."""
        self._caplog.clear()
        with self._caplog.at_level("INFO", "tandem.node"):
            self._log.look(self.links, now)
        return [
            (record.getMessage(), *record.fields.values())  # type: ignore[attr-defined]
            for record in self._caplog.records
        ]


def test_reasons_are_logged_late_and_rarely(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(caplog, MAX_ROUTERS + 1)
    assert lines.at(FIRST_SECONDS - 0.1) == []
    [(event, reasons)] = lines.at(FIRST_SECONDS)
    assert event == "no router has registered this node: it gets no requests"
    assert reasons == {
        f"tcp://router-{number}:5600": "nobody accepts a connection there" for number in range(MAX_ROUTERS)
    }
    assert lines.at(FIRST_SECONDS + REPEAT_SECONDS - 0.1) == []
    assert len(lines.at(FIRST_SECONDS + REPEAT_SECONDS)) == 1


def test_each_registration_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(caplog, 2)
    event = "a router has registered this node"
    lines.links[1].registered = True
    assert lines.at(0.25) == [(event, "tcp://router-1:5600")]
    lines.links[0].registered = True
    assert lines.at(0.5) == [(event, "tcp://router-0:5600")]
    assert lines.at(1000.0) == []
    for link in lines.links:
        link.registered = False
    assert lines.at(1000.0) == []
    assert lines.at(1000.0 + FIRST_SECONDS - 0.1) == []
    assert len(lines.at(1000.0 + FIRST_SECONDS)) == 1
    lines.links[0].registered = True
    assert lines.at(1100.0) == [(event, "tcp://router-0:5600")]
