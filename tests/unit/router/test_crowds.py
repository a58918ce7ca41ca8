"""What many requests need at the same moment is spread over turns of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken
from common.messages.router_inbox import FirstToken, Goodbye, TokenRun, Tokens
from router.dispatch import dispatcher
from router.dispatch.attempt import Attempt
from router.dispatch.open_attempts import OpenAttempts
from router.dispatch.placement_messages import placement_messages
from router.dispatch.turn_steps import END_STEPS, STEPS_PER_TURN
from router.nodes.placer import Placer
from router.nodes.registry import Node
from router.process.turns import PER_TURN
from tests.fakes.router_rig import legs, router_rig
from tests.fakes.turn_count import counting_turns
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Rig


async def test_requests_that_lose_their_node_are_placed_again_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = 10 * PER_TURN
    async with router_rig() as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([1, 2, 3]) for _ in range(requests)]
        await eventually(lambda: sum(isinstance(each, Reserve) for each in decode.received()) == requests)
        async with counting_turns() as count:

            def noted(*arguments: Any) -> Any:
                count.note()
                return placement_messages(*arguments)

            monkeypatch.setattr(dispatcher, "placement_messages", noted)
            await rig.node("decode", "decode-1")
            decode.say(Goodbye(incarnation=decode.ref.incarnation))
            await eventually(lambda: count.total == requests)
        assert count.most <= 2 * PER_TURN
        for client in clients:
            await client.leave()


async def test_requests_that_wait_for_a_node_are_placed_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is lost first and its successor comes later: all of them wait for the same thing."""
    requests = 10 * PER_TURN
    async with router_rig(placement_wait=PATIENCE) as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([1, 2, 3]) for _ in range(requests)]
        await eventually(lambda: sum(isinstance(each, Reserve) for each in decode.received()) == requests)
        waiting = 0
        choose = Placer.choose

        def nowhere(self: Placer, *given: Any) -> Any:
            nonlocal waiting
            found = choose(self, *given)
            waiting += isinstance(found, str)
            return found

        monkeypatch.setattr(Placer, "choose", nowhere)
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        await eventually(lambda: waiting == requests)
        async with counting_turns() as count:

            def noted(*arguments: Any) -> Any:
                count.note()
                return placement_messages(*arguments)

            monkeypatch.setattr(dispatcher, "placement_messages", noted)
            await rig.node("decode", "decode-1")
            await eventually(lambda: count.total == requests)
        assert count.most <= 2 * PER_TURN
        for client in clients:
            await client.leave()


async def test_the_loss_of_a_node_reaches_its_requests_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "LOSSES_PER_TURN", 4)
    requests = 40
    async with router_rig(placement_wait=PATIENCE) as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([1, 2, 3]) for _ in range(requests)]
        await eventually(lambda: sum(isinstance(each, Reserve) for each in decode.received()) == requests)
        lose = Attempt.lose
        async with counting_turns() as count:

            def noted(self: Attempt, node: Node, reason: str) -> None:
                count.note()
                lose(self, node, reason)

            monkeypatch.setattr(Attempt, "lose", noted)
            decode.say(Goodbye(incarnation=decode.ref.incarnation))
            await eventually(lambda: count.total == requests)
        assert count.most <= 2 * 4
        for client in clients:
            await client.leave()


async def test_a_step_of_many_requests_is_handled_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = 5 * STEPS_PER_TURN
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client(max_tokens=runs + 1)
        reserve, _ = await legs(prefill, decode)
        room = reserve.room
        prefill.say(FirstToken(room=room, token=OutputToken(0), finish_reason=None, cached_tokens=0))
        await client.until(1)
        on_run = Attempt.on_run
        async with counting_turns() as count:

            def noted(self: Attempt, run: TokenRun) -> None:
                count.note()
                on_run(self, run)

            monkeypatch.setattr(Attempt, "on_run", noted)
            ids = range(1, runs + 1)
            last = {runs: "length"}
            decode.say(Tokens(runs=[TokenRun(room, n, [OutputToken(n % 99)], last.get(n)) for n in ids]))
            decode.tokens(room, 1, [7])  # a repetition that arrives after all of them
            await client.done()
            await eventually(lambda: count.total >= runs)
        assert client.ids == [0, *(n % 99 for n in ids)]
        assert count.most <= 2 * STEPS_PER_TURN


@pytest.mark.parametrize("last", ["first token", "run"])
async def test_answers_that_end_together_end_over_several_turns(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    requests = 6 * (STEPS_PER_TURN // END_STEPS)
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        clients = [rig.client(max_tokens=2) for _ in range(requests)]
        await eventually(lambda: sum(isinstance(each, Reserve) for each in decode.received()) == requests)
        rooms = [each.room for each in decode.received() if isinstance(each, Reserve)]
        if last == "run":
            prefill.say(
                *(
                    FirstToken(room=room, token=OutputToken(0), finish_reason=None, cached_tokens=0)
                    for room in rooms
                )
            )
            for client in clients:
                await client.until(1)
        close = OpenAttempts.close
        async with counting_turns() as count:

            def noted(self: OpenAttempts, attempt: Attempt) -> None:
                count.note()
                close(self, attempt)

            monkeypatch.setattr(OpenAttempts, "close", noted)
            if last == "run":
                decode.say(Tokens(runs=[TokenRun(room, 1, [OutputToken(7)], "length") for room in rooms]))
            else:
                prefill.say(
                    *(
                        FirstToken(room=room, token=OutputToken(0), finish_reason="length", cached_tokens=0)
                        for room in rooms
                    )
                )
            for client in clients:
                await client.done()
        assert [client.finish for client in clients] == ["length"] * requests
        assert count.total == requests
        assert count.most <= 2 * (STEPS_PER_TURN // END_STEPS)
        rig.nothing_left()


async def test_requests_that_arrive_together_are_parsed_a_few_per_turn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = [await asyncio.open_connection(rig.host, rig.port) for _ in range(10 * PER_TURN)]
    async with counting_turns() as count:
        parse = web.RequestHandler.data_received

        def noted(self: web.RequestHandler, data: bytes) -> None:
            count.note()
            parse(self, data)

        monkeypatch.setattr(web.RequestHandler, "data_received", noted)
        for _, writer in connections:
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await asyncio.wait_for(
            asyncio.gather(*(reader.read() for reader, _ in connections)), PATIENCE
        )
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert count.most <= 2 * PER_TURN
    for _, writer in connections:
        writer.close()


async def test_bodies_that_arrive_together_are_whole(rig: Rig) -> None:
    """Pieces that wait for their turn keep their order, and reading goes on after them."""
    body = {"tokens": [3 + number % 600 for number in range(60_000)]}
    answers = await asyncio.gather(*(rig.post("/detokenize", body) for _ in range(3 * PER_TURN)))
    [(status, first, _), *others] = answers
    assert status == 200
    assert len(first["prompt"]) > 60_000
    assert all((status, answer) == (200, first) for status, answer, _ in others)
