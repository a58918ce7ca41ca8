"""`n` and `best_of`: how many answers there are, and what they share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from common.messages.node_inbox import Abort
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import Failed, Goodbye, PrefillDone
from router.dispatch.generation import GenerationRequest
from router.dispatch.shared_prompt import PromptShare, shares
from router.requests.choice_count import MAX_CHOICES, SEEDS, choice_count, samplings
from router.requests.openai_schema import CompletionRequest
from tests.fakes.router_rig import Client, RouterRig, legs, router_rig
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Rig
from tests.unit.router.dispatch.test_dispatcher import first_token
from tests.unit.router.scripted_generator import delta, one_by_one


def test_counts() -> None:
    for n, best_of, count in ((None, None, 1), (1, 1, 1), (3, None, 3), (3, 3, 3), (3, 1, 3), (None, 1, 1)):
        assert choice_count(CompletionRequest(prompt="x", n=n, best_of=best_of)) == count
    for n, best_of, field in (
        (0, None, "n"),
        (MAX_CHOICES + 1, None, "n"),
        (2, 3, "best_of"),
        (None, 2, "best_of"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            choice_count(CompletionRequest(prompt="x", n=n, best_of=best_of))
        assert caught.value.param == field


def test_seeds_of_choices_ascend() -> None:
    first = SamplingParams(max_tokens=5, seed=SEEDS - 2)
    assert [each.seed for each in samplings(first, 4)] == [SEEDS - 2, SEEDS - 1, 0, 1]
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    assert samplings(greedy, 1) == [greedy]
    with pytest.raises(InvalidRequest, match="temperature"):
        samplings(greedy, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts(rig: Rig, stream: bool) -> None:
    """The index is prompt * n + i, and usage counts each prompt once."""
    for token in range(10, 14):
        rig.generator.will(delta([token], cached=3), delta([token], "length"))
    rig.generator.will(delta([2], "stop"))
    body = {"prompt": [[5], [6, 7]], "n": 2, "seed": 40, "stream": stream}
    usage: Any = None
    found: dict[int, str] = {}
    if stream:
        body["stream_options"] = {"include_usage": True}
        for line in (await rig.raw("/v1/completions", body)).decode().split("\n\n")[:-2]:
            event = json.loads(line[6:])
            usage = event["usage"]
            for choice in event["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    else:
        status, answer, _ = await rig.post("/v1/completions", body)
        assert status == 200
        usage = answer["usage"]
        found = {choice["index"]: choice["text"] for choice in answer["choices"]}
    wanted = {index: rig.tokenizer.decode([10 + index] * 2, False) for index in range(4)}
    assert found == wanted
    assert [(list(each.token_ids), each.sampling.seed) for each in rig.generator.requests] == [
        ([5], 40), ([5], 41), ([6, 7], 40), ([6, 7], 41),
    ]  # fmt: skip
    assert len({each.request_id for each in rig.generator.requests}) == 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_choices_of_a_chat(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "best_of": 3}
    _, answer, _ = await rig.post("/v1/chat/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(rig.generator.requests[0].token_ids)
    for wrong in ({"temperature": 0}, {"n": 9}, {"best_of": 4}):
        status, answer, _ = await rig.post("/v1/chat/completions", body | wrong)
        assert (status, answer["error"]["param"]) == (400, "best_of" if "best_of" in wrong else "n")


async def test_choices_beyond_the_requests_in_flight_are_refused(rig: Rig) -> None:
    status, answer, _ = await rig.post("/v1/completions", {"prompt": [[5]] * 9, "n": 8})
    assert status == 400
    assert "72 answers" in answer["error"]["message"]


def ask(rig: RouterRig, share: PromptShare, number: int) -> Client:
    params = SamplingParams(max_tokens=10, seed=number)
    return Client(rig.dispatcher.generate(GenerationRequest(f"r{number}", [1, 2, 3], params, share=share)))


async def test_others_wait_until_the_pages_are_handed_over_and_go_to_the_same_nodes() -> None:
    """The policy is round robin, which would choose the other nodes."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        others = await rig.pair(1)
        clients = [ask(rig, share, i) for i, share in enumerate(shares(3))]
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await clients[0].until(1)
        assert await prefill.silence(Prefill)
        prefill.say(PrefillDone(room=reserve.room, stages={}))
        for client in clients[1:]:
            own, _ = await legs(prefill, decode)
            first_token(prefill, own.room, 60, "stop")
            await client.done()
        assert await others[0].silence(Prefill)
        decode.tokens(reserve.room, 1, [51], "stop")
        await clients[0].done()
        assert [client.ids for client in clients] == [[50, 51], [60], [60]]
        rig.nothing_left()


@pytest.mark.parametrize("end", ["first token", "failed", "client gone"])
async def test_others_go_on_when_the_first_one_ends_early(end: str) -> None:
    async with router_rig(max_attempts=1) as rig:
        prefill, decode = await rig.pair(0)
        first, second = (ask(rig, share, i) for i, share in enumerate(shares(2)))
        reserve, _ = await legs(prefill, decode)
        if end == "first token":
            first_token(prefill, reserve.room, 50, "stop")
        elif end == "failed":
            prefill.say(Failed(room=reserve.room, code="internal_error", message="x"))
        else:
            first.task.cancel()
        own, _ = await legs(prefill, decode)
        first_token(prefill, own.room, 60, "stop")
        await second.done()
        assert second.ids == [60]
        await eventually(lambda: first.task.done())
        rig.nothing_left()


async def test_a_lost_node_moves_the_others_elsewhere() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        first, second = (ask(rig, share, i) for i, share in enumerate(shares(2)))
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await first.until(1)
        other_prefill, other_decode = await rig.pair(1)
        prefill.say(PrefillDone(room=reserve.room, stages={}))
        prefill.say(Goodbye(incarnation=prefill.ref.incarnation))
        decode.tokens(reserve.room, 1, [51], "stop")
        await first.done()
        own = await other_prefill.expect(Prefill)
        first_token(other_prefill, own.room, 60, "stop")
        await second.done()
        assert (first.ids, second.ids) == ([50, 51], [60])
        assert await other_decode.silence(Abort) is not None
        rig.nothing_left()


async def test_the_end_of_one_choice_on_a_client_that_left_ends_all(rig: Rig) -> None:
    rig.generator.will(delta([10]), 300.0)
    body = {"prompt": "x", "n": 3, "stream": True}
    async with rig.session.post(f"{rig.url}/v1/completions", json=body) as response:
        await response.content.readline()
    await rig.settled(3)


async def test_a_choice_waits_for_the_first_one_no_longer_than_its_own_time() -> None:
    async with asyncio.timeout(PATIENCE):
        await shares(2)[1].wait(0.01)
