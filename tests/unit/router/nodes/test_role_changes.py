"""The router's side of a change of roles: whom it asks, what it waits for, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import Conflict, NoAnswer, NodeLost, UnknownNode
from common.messages.identity import NodeState, Role
from common.messages.node_inbox import ChangeRole
from router.nodes import role_changes
from router.nodes.registration import ExpectedNode
from router.nodes.role_changes import RoleChanges
from tests.fakes.clock import Clock
from tests.fakes.fake_node import PEER_ADDRESS, FakeNode
from tests.fakes.router_rig import RouterRig, router_rig


def changes_of(rig: RouterRig, clock: Clock) -> RoleChanges:
    return RoleChanges(rig.registry, rig.control.send, clock, rig.log)


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
        changes = changes_of(rig, clock)
        asked = asyncio.create_task(changes.change("flex-0", "prefill", 30.0))
        assert await halves["decode"].expect(ChangeRole) == ChangeRole(role="prefill", seconds=30.0)
        await shows(rig, halves, "decode", "draining")
        with pytest.raises(Conflict, match="flex-0 is changing its role"):
            await changes.change("flex-0", "prefill", 30.0)
        with pytest.raises(Conflict, match="flex-0 is changing its role"):
            # It has that role still, and will not keep it.
            await changes.change("flex-0", "decode", 30.0)
        halves["prefill"].beat("up")
        await asyncio.sleep(2 * role_changes.LOOK_SECONDS)
        assert not asked.done(), "until then the node has both roles for whoever asks the router"
        await shows(rig, halves, "prefill")
        changed = await asked
        assert (changed.role, changed.previous, changed.drained) == ("prefill", "decode", 0)
        again = await changes.change("flex-0", "prefill", 30.0)
        assert (again.role, again.previous) == ("prefill", "prefill")
        assert len(rig.registry.eligible_by_role().of["prefill"]) == 2
        assert [node.name for node in rig.registry.eligible_by_role().of["decode"]] == ["decode-0"]


async def test_what_it_refuses() -> None:
    clock = Clock()
    async with router_rig(clock) as rig:
        halves = await movable(rig, "flex-0", "decode")
        await rig.node("prefill", "prefill-0")
        changes = changes_of(rig, clock)
        with pytest.raises(UnknownNode, match=r"no node 'flex-1' .*flex-0, prefill-0"):
            await changes.change("flex-1", "prefill", 1.0)
        with pytest.raises(Conflict, match="prefill-0 is a prefill node for good"):
            await changes.change("prefill-0", "decode", 1.0)
        with pytest.raises(Conflict, match="flex-0 is the only decode node that takes requests"):
            await changes.change("flex-0", "prefill", 1.0)
        await rig.node("decode", "decode-0")
        await shows(rig, halves, "decode", "draining")
        with pytest.raises(Conflict, match="flex-0 is changing its role, or ends"):
            await changes.change("flex-0", "prefill", 1.0)


async def test_a_node_that_keeps_its_role_or_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_changes, "GRACE_SECONDS", 0.0)
    clock = Clock()
    async with router_rig(clock) as rig:
        await rig.pair()
        halves = await movable(rig, "flex-0", "decode")
        changes = changes_of(rig, clock)

        async def begun(**options: Any) -> asyncio.Task[Any]:
            asked = asyncio.create_task(changes.change("flex-0", "prefill", 2.0))
            await halves["decode"].expect(ChangeRole)
            return asked

        asked = await begun()
        clock.now += 2.1
        with pytest.raises(
            NoAnswer, match="flex-0 still had requests after 2 s and goes on as a decode node"
        ):
            await asked
        asked = await begun()
        rig.registry.lose(rig.registry.node(halves["prefill"].ref.incarnation), "test", "closed")
        with pytest.raises(NodeLost, match="flex-0 was lost while it changed its role"):
            await asked
