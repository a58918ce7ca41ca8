"""Requests whose prompts have not begun leave a decode node that drains."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.messages.decode_inbox import Reserve
from common.messages.identity import NodeState
from common.messages.node_inbox import Abort, PeerDraining
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import Failed
from router.nodes import outbox
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import RouterRig, legs, router_rig
from tests.fakes.waiting import eventually
from tests.unit.router.dispatch.test_dispatcher import first_token


async def shows(rig: RouterRig, node: FakeNode, state: NodeState) -> None:
    node.beat(state)
    await eventually(lambda: rig.registry.node(node.ref.incarnation).state == state)


@pytest.mark.parametrize("says", ["prefill", "decode"])
async def test_a_prompt_that_its_node_gives_back_is_placed_on_another_pair(says: str) -> None:
    """The prefill node says so to the router, and to the decode node, whose message may come first."""
    async with router_rig(max_attempts=1) as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3])
        reserve, prompt = await legs(prefill, decode)
        assert (reserve.waited_ms, prompt.waited_ms) == (0, 0)
        other = await rig.node("decode", "decode-1")
        await asyncio.sleep(0.05)
        await shows(rig, decode, "draining")
        assert await prefill.expect(PeerDraining) == PeerDraining(incarnation=decode.ref.incarnation)
        failed = Failed(room=reserve.room, code="moved", message="not begun")
        (prefill if says == "prefill" else decode).say(failed)
        reserve, prompt = await legs(prefill, other)
        assert min(reserve.waited_ms, prompt.waited_ms) >= 50, "it keeps its place in the queues"
        assert (await (decode if says == "prefill" else prefill).expect(Abort)).room == failed.room
        (decode if says == "prefill" else prefill).say(failed)
        first_token(prefill, prompt.room, 50)
        other.tokens(reserve.room, 1, [51], "stop")
        await client.done()
        assert (client.ids, client.finish, client.error) == ([50, 51], "stop", None)
        rig.nothing_left()


async def test_a_prefill_node_that_could_not_be_reached_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.0)
    refused: list[str] = []
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        await rig.node("decode", "decode-1")
        send = rig.send

        def refuse_once(peer: str, message: msgspec.Struct) -> bool:
            if isinstance(message, PeerDraining) and not refused:
                refused.append(peer)
                return False
            return send(peer, message)

        rig.send = refuse_once
        await shows(rig, decode, "draining")
        assert await prefill.expect(PeerDraining) == PeerDraining(incarnation=decode.ref.incarnation)
        assert len(refused) == 1


async def test_nothing_is_given_back_while_no_other_node_can_take_it() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        await shows(rig, decode, "draining")
        assert await prefill.silence(PeerDraining)
        await rig.node("decode", "decode-1")
        await prefill.expect(PeerDraining)
        decode.beat("draining")
        await rig.node("decode", "decode-2")
        assert await prefill.silence(PeerDraining), "once is enough: no prompt for it follows"
        await shows(rig, decode, "up")
        await shows(rig, decode, "draining")
        await prefill.expect(PeerDraining)
        assert not [message for message in prefill.received() if isinstance(message, Prefill | Reserve)]
