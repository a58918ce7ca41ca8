"""What a node logs about routers that refuse it or fall silent."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from common.messages import prefill_inbox
from common.messages.node_inbox import Rejected
from common.messages.prefill_inbox import Prefill
from common.node.life import NodeLife, RoleHandlers
from common.node.profiles import NoProfiler
from common.observability.logs import Log
from tests.fakes.clock import Clock
from tests.fakes.fake_link import FakeLink, FakeLinks


@pytest.fixture
def routers() -> Iterator[list[FakeLink]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    codec: Any = prefill_inbox.codec
    made = [FakeLink(context, codec) for _ in range(2)]
    for index, link in enumerate(made):
        link.address = f"tcp://router-{index}:5600"
    yield made
    for link in made:
        link.close()
    context.term()


def test_a_router_that_refuses_or_falls_silent_is_named(
    routers: list[FakeLink], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    life = NodeLife[Prefill]("i", FakeLinks(routers, clock), Prefill, 30.0, Log("node"), clock, NoProfiler())
    handlers = cast(
        RoleHandlers[Prefill], SimpleNamespace(router_lost=lambda router, last: 3, sweep=lambda now: None)
    )
    routers[0].registered = False
    routers[0].deliver(Rejected(reason="another version"))
    life.receive(handlers, clock())
    routers[1].router_lost = True
    life.look_after(handlers, clock())
    refused, lost = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert (refused["peer"], refused["reason"]) == ("tcp://router-0:5600", "another version")
    assert (lost["router"], lost["requests"]) == ("tcp://router-1:5600", 3)
    assert not life.stopping()
