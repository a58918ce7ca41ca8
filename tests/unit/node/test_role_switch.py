"""The role of a movable node: its halves never serve at the same time, and a change ends or is given up."""

from __future__ import annotations

from typing import Any, cast

import pytest

from common.messages.identity import NodeCounters, NodeLoad, Role
from common.messages.node_inbox import ChangeRole
from common.messages.prefill_inbox import Prefill
from common.node.life import NodeLife
from common.node.profiles import NoProfiler
from common.node.role_switch import FIXED_ROLE, RoleSwitch
from common.node.router_links import RouterLinks
from common.observability.logs import Log
from tests.fakes.clock import Clock

PEER = "1" * 32


def order(role: Role, seconds: float, router: str = "router") -> ChangeRole:
    return ChangeRole(order=f"{router} wants {role}", router=router, role=role, seconds=seconds)


class Rig:
    def __init__(self) -> None:
        self.roles: list[Role] = []
        self.switch = RoleSwitch("decode", 0.5, self.roles.append)
        self.prefill, self.decode = self.switch.half("prefill"), self.switch.half("decode")

    def states(self, now: float, requests: int = 0) -> tuple[str, str]:
        """Let both halves turn; only the one for decoding has requests."""
        return self.decode.state(requests, now), self.prefill.state(0, now)


def test_a_change_waits_for_the_last_request_and_for_the_routers() -> None:
    rig = Rig()
    assert rig.states(0.0) == ("up", "standby")
    rig.decode.change(order("prefill", 30.0), 10.0)
    assert rig.states(10.1, 2) == ("draining", "standby")
    assert rig.decode.takes(PEER), "routers that have not heard of the change still send requests"
    assert not rig.prefill.takes(PEER)
    assert rig.states(10.4) == ("draining", "standby"), "not all routers have heard of it"
    assert rig.states(11.0, 1) == ("draining", "standby")
    assert rig.states(12.0) == ("standby", "up")
    assert rig.prefill.takes(PEER)
    assert not rig.decode.takes(PEER)
    assert rig.roles == [rig.switch.role] == ["prefill"]


def test_a_change_that_takes_too_long_is_given_up() -> None:
    rig = Rig()
    rig.decode.change(order("prefill", 3.0), 10.0)
    assert rig.states(12.9, 1) == ("draining", "standby")
    assert rig.states(13.0, 1) == ("up", "standby")
    assert rig.states(14.0) == ("up", "standby"), "and not resumed"
    assert rig.roles == []


def test_a_node_without_requests_changes_its_role_however_little_time_they_get() -> None:
    rig = Rig()
    rig.decode.change(order("prefill", 0.1), 10.0)
    assert rig.states(10.2) == ("draining", "standby"), "not all routers have heard of it"
    assert rig.states(10.6) == ("standby", "up")


def test_a_second_change_does_not_replace_the_first() -> None:
    rig = Rig()
    assert rig.decode.change(order("decode", 3.0), 10.0) == ""
    assert rig.states(10.1) == ("up", "standby"), "it has that role"
    assert rig.decode.change(order("prefill", 3.0), 10.0) == ""
    refused = "it is changing its role from decode to prefill, for which router asked 2.0 s ago"
    assert rig.prefill.change(order("prefill", 60.0, "router-1"), 12.0) == refused
    assert rig.decode.change(order("decode", 60.0, "router-1"), 12.0) == refused, "it will not keep that role"
    assert rig.states(13.0, 1) == ("up", "standby")
    assert rig.decode.change(order("prefill", 3.0, "router-1"), 13.1) == "", "the first one has ended"


def test_the_half_in_standby_computes_short_prompts_for_its_own_node() -> None:
    switch = RoleSwitch("decode", 0.5, lambda role: None, 128)
    prefill, decode = switch.half("prefill"), switch.half("decode")
    assert not prefill.takes(PEER), "not even known yet"
    switch.local_peer = PEER
    assert prefill.takes(PEER)
    assert not prefill.takes("2" * 32)
    assert (prefill.max_forward_tokens(), decode.max_forward_tokens()) == (128, None)
    switch.change(order("prefill", 9.0), 0.0)
    assert prefill.takes(PEER), "the other half is draining and needs the prompts that it was given"
    assert decode.state(0, 1.0) == "standby"
    assert prefill.takes("2" * 32)
    assert (prefill.max_forward_tokens(), decode.takes(PEER)) == (None, False)


def test_a_node_with_one_role_refuses() -> None:
    assert FIXED_ROLE.change(order("prefill", 3.0), 0.0) == "it is not movable"
    assert FIXED_ROLE.takes(PEER)
    assert FIXED_ROLE.state(5, 0.0) == "up"


class Links:
    """Delivers the given messages once, and keeps what the life publishes and answers."""

    registered: tuple[()] = ()
    all: tuple[()] = ()
    count = 1

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.published: list[str] = []
        self.answers: list[Any] = []

    def drain(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return [(self, message) for message in messages]

    def send(self, message: Any) -> None:
        self.answers.append(message)

    def publish(self, state: str, load: object, counters: object, held: object) -> None:
        self.published.append(state)


def test_the_life_of_a_half_follows_the_switch_until_it_ends() -> None:
    rig, links, clock = Rig(), Links(), Clock()
    routers = cast(RouterLinks[Any], links)
    life = NodeLife[Prefill]("i", routers, Prefill, 30.0, Log("node"), clock, NoProfiler(), rig.prefill)

    def turn(held: int = 0) -> str:
        life.receive(None, clock())  # type: ignore[arg-type]
        life.publish(NodeLoad(), NodeCounters(), ())
        life.end_turn(0, clock(), held)
        return links.published[-1]

    assert turn() == "standby"
    assert not life.takes(PEER)
    links.messages = [order("prefill", 30.0), order("prefill", 9.0, "router-1")]
    turn()
    assert [each.order for each in links.answers] == ["router wants prefill", "router-1 wants prefill"]
    assert links.answers[0].refusal == "", "exactly one router has its way"
    assert "to prefill, for which router asked 0.0 s ago" in links.answers[1].refusal
    clock.now += 1.0
    assert rig.decode.state(0, clock()) == "standby"
    turn()
    assert turn() == "up"
    assert life.takes(PEER)
    links.messages = [order("decode", 30.0)]
    turn(1)
    clock.now += 1.0
    turn(1)
    assert turn(1) == "standby", "a peer that proves nothing does not keep a node in its role"
    life.drain()
    assert not life.takes(PEER)
    links.messages = [order("prefill", 30.0)]
    assert turn(1) == "draining"
    assert not life.stopping(), "a peer may still write to its memory"
    assert links.answers[-1].refusal == "it is ending"
    turn()
    assert life.stopping()


def test_a_node_that_ends_before_its_requests_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Routers only hear its goodbye."""
    clock = Clock()
    routers = cast(RouterLinks[Any], Links())
    life = NodeLife[Prefill]("i", routers, Prefill, 30.0, Log("node"), clock, NoProfiler())
    life.drain()
    clock.now += 30.0
    life.end_turn(2, clock())
    assert not life.stopping()
    clock.now += 0.1
    life.end_turn(2, clock())
    assert life.stopping()
    assert "the drain timeout has passed" in caplog.text
