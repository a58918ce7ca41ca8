"""The dispatcher with policies that know caches: what requests teach the router, over a real socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.errors import Overloaded
from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import NodeLoad, Role
from common.messages.node_inbox import FlushCache
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FirstToken, PrefillDone
from router.dispatch.generation import GenerationRequest
from router.dispatch.shared_prompt import shares
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost
from tests.fakes.fake_node import FakeNode
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.fakes.router_rig import Client, RouterRig, router_rig
from tests.fakes.served_series import rendered
from tests.fakes.waiting import eventually

PROMPT = list(range(1, 201))
RULES = replace(DEFAULT_RULES, block_tokens=16)


def policies(name: str = "cache_aware") -> dict[Role, PlacementPolicy]:
    return {"prefill": make_policy(name, prefill_cost), "decode": make_policy(name, decode_cost)}


async def pairs(rig: RouterRig) -> dict[str, FakeNode]:
    """Return two prefill and two decode nodes, by incarnation."""
    nodes = [node for number in range(2) for node in await rig.pair(number)]
    for node in nodes:
        node.beat(load=NodeLoad(prompt_times=((64, 10.0), (4096, 600.0)), free_pages=1000, total_pages=1000))
        await node.echo()
    return {node.ref.incarnation: node for node in nodes}


def asked(nodes: dict[str, FakeNode]) -> Reserve | None:
    """Return the reservation that one of the decode nodes has received."""
    unread = [message for node in nodes.values() for message in node.received()]
    return next((message for message in unread if isinstance(message, Reserve)), None)


async def serve(nodes: dict[str, FakeNode], client: Client, cached: int = 0) -> list[str]:
    """Answer one request as its nodes do; return their names."""
    reserve = await eventually(lambda: asked(nodes))
    assert reserve is not None
    prefill = nodes[reserve.prefill.incarnation]
    room = (await prefill.expect(Prefill)).room
    decode = next(node for node in nodes.values() if reserve in node.unread)
    decode.unread.remove(reserve)
    prefill.say(FirstToken(room=room, token=OutputToken(7), finish_reason=None, cached_tokens=cached))
    stages = {"prefill_start": 0.0, "prefill_end": 0.1, "slots": 0.05, "last_page_sent": 0.15}
    prefill.say(PrefillDone(room=room, stages=stages))
    await client.until(1)
    decode.tokens(room, 1, list(range(300, 340)), "length", first_decode=0.0, finished=0.4)
    await client.done()
    assert client.error is None
    return [prefill.ref.name, decode.ref.name]


async def test_the_next_turn_of_a_chat_goes_to_the_nodes_of_the_last_one() -> None:
    async with router_rig(policies=policies(), rules=RULES) as rig:
        nodes = await pairs(rig)
        first = await serve(nodes, rig.client(PROMPT, max_tokens=41))
        assert rig.history.transfers.ms("any", "other", 200) == pytest.approx(50.0)
        assert rig.history.steps.time.fixed > 5.0
        answer = [7, *range(300, 340)]
        for _ in range(3):
            turn = rig.client([*PROMPT, *answer, 1, 2, 3], max_tokens=41)
            assert await serve(nodes, turn, cached=192) == first
        series = rendered(rig.metrics)[0].decode()
        assert "tandem_placement_expected_cached_tokens_total 672.0" in series  # 192, then 240 twice
        assert "tandem_placement_found_cached_tokens_total 576.0" in series
        assert rig.history.blocks == 15 + 17
        assert not rig.flush_caches()
        for node in nodes.values():
            await node.expect(FlushCache)
        assert rig.history.blocks == 0
        rig.nothing_left()


async def test_what_a_lost_node_held_is_forgotten() -> None:
    async with router_rig(policies=policies(), rules=RULES) as rig:
        nodes = await pairs(rig)
        prefill, _ = await serve(nodes, rig.client(PROMPT, max_tokens=41))
        gone = next(node for node in nodes.values() if node.ref.name == prefill)
        rig.registry.leave(gone.ref.incarnation)
        other, _ = await serve(nodes, rig.client(PROMPT, max_tokens=41))
        assert other != prefill
        rig.nothing_left()


async def test_prompts_are_hashed_only_where_there_is_a_choice() -> None:
    async with router_rig(policies=policies(), rules=RULES) as rig:
        prefill, decode = await rig.pair()
        nodes = {node.ref.incarnation: node for node in (prefill, decode)}
        await serve(nodes, rig.client(PROMPT, max_tokens=41))
        assert rig.history.blocks == 0
        rig.nothing_left()


async def test_a_session_stays_on_its_nodes() -> None:
    async with router_rig(policies=policies("least_loaded")) as rig:
        nodes = await pairs(rig)
        first = await serve(nodes, rig.client(PROMPT, session=b"s", max_tokens=41))
        for number in range(3):
            turn = rig.client([number + 9] * 50, session=b"s", max_tokens=41)
            assert await serve(nodes, turn) == first
        assert rig.history.blocks == 0


async def test_a_request_is_refused_while_all_nodes_of_a_role_are_busy() -> None:
    rules = replace(DEFAULT_RULES, busy_pool_share=0.5)
    async with router_rig(policies=policies("least_loaded"), rules=rules) as rig:
        nodes = await pairs(rig)
        full = NodeLoad(total_pages=1000, free_pages=100)
        for node in nodes.values():
            if node.ref.role == "decode":
                node.beat(load=full)
                await node.echo()
        client = await rig.client(PROMPT).done()
        assert isinstance(client.error, Overloaded)
        assert client.error.retry_after == 1.0
        assert "tandem_requests_refused_busy_total 1.0" in rendered(rig.metrics)[0].decode()
        rig.nothing_left()


async def test_the_choices_of_a_prompt_hash_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_rig(policies=policies(), rules=RULES) as rig:
        nodes, hashed = await pairs(rig), list[int]()
        prompt = rig.history.prompt

        def counted(tokens: Sequence[int], *more: Any) -> PlacedPrompt:
            hashed.append(len(tokens))
            return prompt(tokens, *more)

        monkeypatch.setattr(rig.history, "prompt", counted)
        for share in shares(3):
            request = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=41), share=share)
            await serve(nodes, Client(rig.dispatcher.generate(request)))
        assert hashed == [len(PROMPT)]
        await serve(nodes, rig.client(PROMPT, max_tokens=41))
        assert hashed == [len(PROMPT)] * 2
