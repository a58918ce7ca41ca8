"""Hidden states on their way from the nodes to the client: in order, each once, over attempts and in every answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import InternalError
from common.messages.node_inbox import Abort
from common.messages.router_inbox import Goodbye, HiddenStates
from router.dispatch import answer_states
from router.dispatch.answer_states import AnswerStates
from router.dispatch.generation import GenerationRequest, TakeNow, TokenDelta, take_nothing
from router.requests.hidden_states import StateLimit, StateMemory
from tests.fakes.router_rig import legs, legs_after_losses, router_rig
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.dispatch.test_dispatcher import first_token
from tests.unit.router.scripted_generator import delta, one_by_one

SIZE = 2
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


def rows(*values: float) -> bytes:
    """The states of positions whose values are [value, -value]."""
    return np.array([[value, -value] for value in values], dtype="<f4").tobytes()


def states_of(collected: AnswerStates, tokens: int) -> list[float]:
    return [row[0] for block in collected.blocks(0, collected.count(tokens)) for row in block]


async def test_a_lost_node_repeats_and_loses_none() -> None:
    """States that came before their tokens are dropped with the attempt, and computed again by the next one."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        collected = AnswerStates(0, 3, 10, SIZE)
        client = rig.client([1, 2, 3], states=collected)
        reserve, prompt = await legs(prefill, decode)
        assert reserve.sampling.hidden_states_from == prompt.sampling.hidden_states_from == 0
        decode.say(HiddenStates(room=prompt.room, start=3, states=rows(3, 4)))
        prefill.say(HiddenStates(room=prompt.room, start=0, states=rows(0, 1)))
        prefill.say(HiddenStates(room=prompt.room, start=2, states=rows(2)))
        first_token(prefill, prompt.room, 50)
        decode.tokens(prompt.room, 1, [51])
        await client.until(2)
        other = await rig.pair(1)
        prefill.say(Goodbye(incarnation=prefill.ref.incarnation))
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        reserve, again = await legs_after_losses(*other)
        assert (again.token_ids, again.sampling.hidden_states_from) == ([1, 2, 3, 50, 51], 4)
        other[0].say(HiddenStates(room=again.room, start=4, states=rows(40)))
        first_token(other[0], again.room, 52)
        other[1].say(HiddenStates(room=again.room, start=5, states=rows(5)))
        other[1].tokens(again.room, 1, [53], "stop")
        await client.done()
        assert client.ids == [50, 51, 52, 53]
        assert states_of(collected, 4) == [0, 1, 2, 3, 40, 5]
        rig.nothing_left()


@pytest.mark.parametrize(
    ("start", "data"), [(1, rows(1)), (0, rows(0, 1, 2, 3)), (0, rows(0) + b"x"), (0, b"")]
)
async def test_states_that_do_not_follow_end_the_attempt(start: int, data: bytes) -> None:
    async with router_rig(max_attempts=1) as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3], states=AnswerStates(0, 3, 10, SIZE))
        _, prompt = await legs(prefill, decode)
        prefill.say(HiddenStates(room=prompt.room, start=start, states=data))
        await client.done()
        assert "hidden states of other positions" in str(client.error)
        assert (await prefill.expect(Abort)).room == prompt.room
        rig.nothing_left()


async def test_states_that_nobody_asked_for_are_dropped() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3])
        _, prompt = await legs(prefill, decode)
        assert prompt.sampling.hidden_states_from is None
        prefill.say(HiddenStates(room=prompt.room, start=0, states=rows(0)))
        first_token(prefill, prompt.room, 50, "stop")
        await client.done()
        assert client.finish == "stop"


def test_no_node_sends_more_than_the_answer_can_have() -> None:
    collected = AnswerStates(0, 2, 2, SIZE)
    collected.resume(2)
    collected.add_prefilled(0, rows(0, 1))
    collected.add_decoded(2, rows(2, 3))
    with pytest.raises(InternalError):
        collected.add_decoded(4, rows(4))
    with pytest.raises(InternalError, match="left out"):
        collected.count(4)


def test_states_with_a_gap_before_them_are_computed_again() -> None:
    collected = AnswerStates(0, 3, 10, SIZE)
    collected.resume(3)
    collected.add_prefilled(0, rows(0, 1))
    collected.add_decoded(3, rows(3, 4))
    collected.resume(5)
    assert collected.wanted_from == 2
    collected.add_prefilled(2, rows(20, 30, 40))
    assert states_of(collected, 3) == [0, 1, 20, 30, 40]


@pytest.fixture
async def rig(serve: Serve) -> Rig:
    """A server that allows hidden states of up to 40 positions, and whose generator sends them."""
    made = await serve(served=replace(SERVED, states=StateLimit(SIZE, 40 * SIZE * 4)))
    scripted = made.generator.generate

    async def generate(
        request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncIterator[TokenDelta]:
        if request.states is not None:
            tokens = len(request.token_ids)
            request.states.resume(tokens)
            positions = range(request.states.first, tokens + request.sampling.max_tokens - 1)
            split = tokens - request.states.first
            request.states.add_prefilled(positions[0], rows(*positions[:split]))
            if positions[split:]:
                request.states.add_decoded(tokens, rows(*positions[split:]))
        async for each in scripted(request, take_now):
            yield each

    made.generator.generate = generate  # type: ignore[method-assign, assignment]
    return made


def state(position: int) -> list[float]:
    return [float(position), -float(position)]


async def test_the_native_route_has_all_positions(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SGLang: a list of the prompt's states, then those of the tokens but the last; in small blocks here."""
    monkeypatch.setattr(answer_states, "ENCODED", 4)
    rig.generator.will(*one_by_one([331, 300, 301]))
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True}
    status, answer, _ = await rig.post(NATIVE, body)
    assert status == 200
    assert answer["meta_info"]["hidden_states"] == [[state(0), state(1), state(2)], state(3), state(4)]
    rig.generator.will(delta([331], "stop"))
    body |= {"input_ids": [[5], [6, 7]], "sampling_params": {"max_new_tokens": 1}}
    rig.generator.scripts.pop(0)
    _, listed, _ = await rig.post(NATIVE, body)
    found = [each["meta_info"]["hidden_states"] for each in listed]
    assert found == [[[state(0)]], [[state(0), state(1)]]]
    _, prompts_only, _ = await rig.post(NATIVE, {**body, "sampling_params": {"max_new_tokens": 0}})
    assert [each["meta_info"]["hidden_states"] for each in prompts_only] == found
    assert [each["output_ids"] for each in prompts_only] == [[], []]
    _, plain, _ = await rig.post(NATIVE, {"input_ids": [5]})
    assert "hidden_states" not in plain["meta_info"]


async def events_of(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream of the native route."""
    *sent, done, _ = (await rig.raw(NATIVE, {**body, "stream": True})).decode().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in sent]


async def test_the_last_event_of_a_stream_is_the_complete_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone has the states: events repeat everything, and repeated states would be quadratic."""
    monkeypatch.setattr(answer_states, "ENCODED", 4)
    rig.generator.will(*one_by_one([331, 300, 301]))
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True}
    _, whole, _ = await rig.post(NATIVE, body)
    *events, last = await events_of(rig, body)
    assert last["meta_info"]["hidden_states"] == whole["meta_info"]["hidden_states"]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert len(events) == 2
    assert all(each["meta_info"].keys().isdisjoint({"hidden_states", "e2e_latency"}) for each in events), (
        "the choice has not ended"
    )
    body |= {"sampling_params": {"max_new_tokens": 3, "n": 2, "temperature": 1}}
    _, both, _ = await rig.post(NATIVE, body)
    found = {each["index"]: each for each in await events_of(rig, body)}
    assert [found[index]["meta_info"]["hidden_states"] for index in (0, 1)] == [
        each["meta_info"]["hidden_states"] for each in both
    ]


async def test_missing_states_end_a_stream_with_an_error(rig: Rig) -> None:
    rig.generator.will(*one_by_one([331, 300, 301, 302]))
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True}
    sent = (await rig.raw(NATIVE, {**body, "stream": True})).decode().split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in sent if event]
    assert "left out hidden states" in events[-1]["error"]["message"]


def test_the_json_of_states_is_made_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would take five times the memory that is reserved for the states."""
    monkeypatch.setattr(answer_states, "ENCODED", 4)
    collected = AnswerStates(0, 2, 3, SIZE)
    collected.resume(2)
    collected.add_prefilled(0, rows(0, 1))
    collected.add_decoded(2, rows(2, 3))
    parts = collected.encoded(3)
    assert next(parts) == b"[[[0.0,0.0],[1.0,-1.0]"
    assert b"".join(parts) == b"],[2.0,-2.0],[3.0,-3.0]]"
    with pytest.raises(InternalError, match="left out"):
        collected.encoded(4)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_other_routes_have_the_last_position(path: str, rig: Rig) -> None:
    """As in SGLang, also at a stop string, and in an event of its own after the last one of the choice."""
    rig.generator.will(*one_by_one([331, 300, 301]))
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    )
    asked = {**prompt, "max_tokens": 3, "return_hidden_states": True}
    _, answer, _ = await rig.post(path, asked)
    tokens = answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["hidden_states"] == state(tokens + 1)
    _, both, _ = await rig.post(path, {**asked, "return_token_ids": True, "n": 2, "temperature": 1})
    assert [each["hidden_states"] for each in both["choices"]] == [state(tokens + 1)] * 2
    assert both["choices"][1]["token_ids"] == [331, 300, 301]
    sent = (await rig.raw(path, {**asked, "stream": True})).decode().split("\n\n")
    *chunks, last = [
        json.loads(event.removeprefix("data: ")) for event in sent if event.startswith("data: {")
    ]
    shown = last["choices"][0]["delta"] if path == CHAT else last["choices"][0]
    assert last["choices"][0].get("stop_reason", "absent") == ("absent" if path == CHAT else None)
    assert shown["hidden_states"] == state(tokens + 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(
        "hidden_states" in json.dumps(chunk) or "token_ids" in json.dumps(chunk) for chunk in chunks
    )
    text = rig.tokenizer.decode([331, 300], True)
    _, stopped, _ = await rig.post(path, {**asked, "stop": text[-1]})
    used = stopped["usage"]["completion_tokens"]
    assert stopped["choices"][0]["hidden_states"] == state(tokens + used - 2)


async def test_refusals_name_the_key_and_the_arithmetic(rig: Rig, serve: Serve) -> None:
    body = {"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": 12}, "return_hidden_states": True}
    status, answer, _ = await rig.post(NATIVE, body)
    assert (status, answer["error"]["param"]) == (400, "return_hidden_states")
    assert "30 tokens in the prompt and 12 tokens" in answer["error"]["message"]
    assert "41 * 2 * 4 = 328 bytes; the limit is 320 (model.hidden_states_mib)" in answer["error"]["message"]
    status, answer, _ = await rig.post(TEXT, {"prompt": "x", "max_tokens": 41, "return_hidden_states": True})
    assert (status, "41 * 2 * 4 = 328 bytes" in answer["error"]["message"]) == (400, True)
    closed = await serve()
    for path, asked in ((NATIVE, body), (TEXT, {"prompt": "x", "return_hidden_states": True})):
        status, answer, _ = await closed.post(path, asked)
        assert (status, answer["error"]["param"]) == (400, "return_hidden_states")
        assert "model.return_hidden_states" in answer["error"]["message"]


def test_the_memory_of_all_answers_is_bounded() -> None:
    memory = StateMemory(100)
    # 6 positions of 8 bytes
    one = AnswerStates(0, 3, 4, SIZE)
    with memory.hold([one, one]):
        assert memory.held == 96
        with pytest.raises(Exception, match="try again later"), memory.hold([one]):
            pass
        with memory.hold([]):
            pass
    assert memory.held == 0
    with pytest.raises(Exception, match="ask for fewer answers"), memory.hold([one] * 3):
        pass
