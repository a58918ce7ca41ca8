"""The router's side of a change of roles: whom it asks, what it waits for, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from common.errors import Conflict, NoAnswer, NodeLost, UnknownNode
from common.messages.identity import NodeState, Role
from common.messages.node_inbox import ChangeRole
from common.messages.router_inbox import ChangeAnswered, Goodbye
from router.nodes import role_changes
from router.nodes.registration import ExpectedNode
from router.nodes.role_changes import RoleChanged
from tests.fakes.clock import Clock
from tests.fakes.fake_node import PEER_ADDRESS, FakeNode
from tests.fakes.router_rig import RouterRig, router_rig
from tests.fakes.waiting import PATIENCE


def change(rig: RouterRig, name: str, role: Role, seconds: float) -> Coroutine[Any, Any, RoleChanged]:
    return rig.orders.roles.change(name, role, seconds, "router-1")


async def asked(rig: RouterRig, half: FakeNode, refusal: str | None = "") -> asyncio.Task[RoleChanged]:
    """Ask for flex-0 as a prefill node, which the serving half answers unless `refusal` is None."""
    task = asyncio.create_task(change(rig, "flex-0", "prefill", 2.0))
    order = await half.expect(ChangeRole)
    assert (order.router, order.role, order.seconds) == ("router-1", "prefill", 2.0)
    if refusal is not None:
        half.say(ChangeAnswered(order=order.order, refusal=refusal))
        # The link keeps the order of messages: with this answer, the router has read the one before it.
        await half.register()
    return task


async def movable(rig: RouterRig, name: str, role: Role) -> dict[Role, FakeNode]:
    """Register both halves of a movable node, of which one serves."""
    halves: dict[Role, FakeNode] = {}
    for each in ("prefill", "decode"):
        halves[each] = rig.fake(each, name)
    rig.expected[name] = ExpectedNode(
        "prefill", PEER_ADDRESS, 1, None, decoding=ExpectedNode("decode", "", 1, None)
    )
    for half in halves.values():
        await half.register()
    await shows(rig, halves, role)
    return halves


async def shows(rig: RouterRig, halves: dict[Role, FakeNode], role: Role, serving: NodeState = "up") -> None:
    """Let both halves send heartbeats, and wait until the router has read them."""
    for each, half in halves.items():
        wanted = serving if each == role else "standby"
        while rig.registry.node(half.ref.incarnation).state != wanted:
            half.beat(wanted)
            await asyncio.sleep(0.01)


async def test_it_answers_once_the_node_serves_in_its_new_role() -> None:
    clock = Clock()
    async with router_rig(clock) as rig:
        await rig.pair()
        halves = await movable(rig, "flex-0", "decode")
        changing = await asked(rig, halves["decode"])
        await shows(rig, halves, "decode", "draining")
        with pytest.raises(Conflict, match="flex-0 is changing its role"):
            await change(rig, "flex-0", "prefill", 30.0)
        with pytest.raises(Conflict, match="flex-0 is changing its role"):
            # It has that role still, and will not keep it.
            await change(rig, "flex-0", "decode", 30.0)
        halves["prefill"].beat("up")
        await asyncio.sleep(2 * role_changes.LOOK_SECONDS)
        assert not changing.done(), "until then the node has both roles for whoever asks the router"
        await shows(rig, halves, "prefill")
        changed = await changing
        assert (changed.role, changed.previous, changed.drained) == ("prefill", "decode", 0)
        again = await change(rig, "flex-0", "prefill", 30.0)
        assert (again.role, again.previous) == ("prefill", "prefill")
        assert len(rig.registry.eligible_by_role().of["prefill"]) == 2
        assert [node.name for node in rig.registry.eligible_by_role().of["decode"]] == ["decode-0"]


async def test_what_it_refuses() -> None:
    clock = Clock()
    async with router_rig(clock) as rig:
        halves = await movable(rig, "flex-0", "decode")
        await rig.node("prefill", "prefill-0")
        with pytest.raises(UnknownNode, match=r"no node 'flex-1' .* there are: flex-0, prefill-0$"):
            await rig.orders.profiles.record("flex-1", 1.0, 1)
        with pytest.raises(UnknownNode, match=r"no node 'flex-1' .*flex-0, prefill-0"):
            await change(rig, "flex-1", "prefill", 1.0)
        with pytest.raises(Conflict, match="prefill-0 is a prefill node for good"):
            await change(rig, "prefill-0", "decode", 1.0)
        with pytest.raises(Conflict, match="flex-0 is the only decode node that takes requests"):
            await change(rig, "flex-0", "prefill", 1.0)
        await rig.node("decode", "decode-0")
        await shows(rig, halves, "decode", "draining")
        with pytest.raises(Conflict, match="flex-0 is changing its role or ending"):
            await change(rig, "flex-0", "prefill", 1.0)


async def test_a_node_that_keeps_its_role_or_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_changes, "GRACE_SECONDS", 0.0)
    clock = Clock()
    async with router_rig(clock) as rig:
        await rig.pair()
        halves = await movable(rig, "flex-0", "decode")
        changing = await asked(rig, halves["decode"])
        await asyncio.sleep(2 * role_changes.LOOK_SECONDS)
        clock.now += 2.1
        kept = "flex-0 still had requests after 2 s and goes on as a decode node"
        with pytest.raises(NoAnswer, match=kept):
            await changing
        changing = await asked(rig, halves["decode"])
        rig.registry.lose(rig.registry.node(halves["prefill"].ref.incarnation), "test", "closed")
        with pytest.raises(NodeLost, match="flex-0 was lost while it changed its role"):
            await changing


async def test_a_change_that_another_router_has_begun() -> None:
    """Both routers ask before a heartbeat tells of either change: the node follows one, and says so to the other."""
    async with router_rig() as rig:
        await rig.pair()
        halves = await movable(rig, "flex-0", "decode")
        changing = await asked(rig, halves["decode"], "it changes to prefill, for which router-0 asked")
        with pytest.raises(Conflict, match="flex-0 refuses: it changes to prefill, for which router-0 asked"):
            await changing
        assert not (await asked(rig, halves["decode"])).done(), "and the next one can be asked for"


async def test_an_order_that_is_lost_holds_up_no_other_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node has ended, or its link: a later change does not wait for the time that the lost one had."""
    monkeypatch.setattr(role_changes, "ANSWER_SECONDS", 1.0)
    clock = Clock()
    async with router_rig(clock) as rig:
        await rig.pair()
        halves = await movable(rig, "flex-0", "decode")
        changing = await asked(rig, halves["decode"], None)
        halves["decode"].close()
        with pytest.raises(NodeLost, match="flex-0 was lost while it changed its role"):
            await asyncio.wait_for(changing, PATIENCE)
        halves["prefill"].say(Goodbye(incarnation=halves["prefill"].ref.incarnation))
        halves = await movable(rig, "flex-0", "decode")
        changing = await asked(rig, halves["decode"], None)
        halves["decode"].say(ChangeAnswered(order="of an earlier incarnation"))
        await asyncio.sleep(2 * role_changes.LOOK_SECONDS)
        assert not changing.done()
        clock.now += 1.1
        with pytest.raises(NoAnswer, match="flex-0 has not answered the order to change its role"):
            await asyncio.wait_for(changing, PATIENCE)
        await shows(rig, halves, "decode", "draining")
        await shows(rig, halves, "decode")
        changing = await asked(rig, halves["decode"])
        await shows(rig, halves, "prefill")
        assert (await changing).role == "prefill"
