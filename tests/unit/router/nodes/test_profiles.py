"""The router's side of profiles: one open order per node, and an end for each."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Conflict, NoAnswer, NodeLost, Unavailable, UnknownNode
from common.messages.node_inbox import Profile
from common.messages.router_inbox import Goodbye, ProfileEnded
from router.nodes import profiles
from tests.fakes.router_rig import router_rig
from tests.fakes.waiting import PATIENCE


async def test_the_answer_of_a_node_is_returned() -> None:
    async with router_rig() as rig:
        node = await rig.node("decode", "decode-0")
        asked = asyncio.create_task(rig.orders.profiles.record("decode-0", 2.0, 30))
        order = await node.expect(Profile)
        assert (order.seconds, order.steps) == (2.0, 30)
        with pytest.raises(Conflict, match="is being recorded"):
            await rig.orders.profiles.record("decode-0", 1.0, 1)
        node.say(ProfileEnded(order="another", path="/wrong"))
        node.say(ProfileEnded(order=order.order, path="/p", steps=30))
        assert (await asyncio.wait_for(asked, PATIENCE)).path == "/p"
        again = asyncio.create_task(rig.orders.profiles.record("decode-0", 2.0, 30))
        order = await node.expect(Profile)
        node.say(ProfileEnded(order=order.order, busy=True, problem="busy"))
        with pytest.raises(Conflict, match="is recording another profile"):
            await again


async def test_every_order_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "WRITE_SECONDS", 0.05)
    async with router_rig() as rig:
        with pytest.raises(UnknownNode, match="there are: none"):
            await rig.orders.profiles.record("decode-0", 2.0, 30)
        node = await rig.node("decode", "decode-0")
        with pytest.raises(NoAnswer):
            await rig.orders.profiles.record("decode-0", 0.01, 30)
        monkeypatch.setattr(profiles, "WRITE_SECONDS", PATIENCE)
        asked = asyncio.create_task(rig.orders.profiles.record("decode-0", 2.0, 30))
        await node.expect(Profile)
        order = await node.expect(Profile)
        node.say(ProfileEnded(order=order.order, problem="the disk is full"))
        with pytest.raises(Unavailable, match="decode-0: the disk is full"):
            await asked
        asked = asyncio.create_task(rig.orders.profiles.record("decode-0", 2.0, 30))
        await node.expect(Profile)
        node.say(Goodbye(incarnation=node.ref.incarnation))
        with pytest.raises(NodeLost):
            await asked
