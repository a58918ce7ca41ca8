"""`input_ids` of chats (SGLang): the prompt's tokens, which the chat template would otherwise make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.router.chat.test_chat_tools_http import STYLE
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, TOOLS
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

pytestmark = pytest.mark.usefixtures("both_readers")

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "input_ids": [5, 300, 6]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


async def test_they_are_the_prompt(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    _, answer, _ = await rig.post(CHAT, ASKED | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == list(rig.generator.requests[-1].token_ids) == [5, 300, 6]
    assert answer["usage"]["prompt_tokens"] == 3
    await rig.post(CHAT, ASKED | {"truncate_prompt_tokens": 2})
    assert list(rig.generator.requests[-1].token_ids) == [300, 6]
    await rig.post(CHAT, ASKED | {"input_ids": None})
    assert list(rig.generator.requests[-1].token_ids) != [5, 300, 6]


async def test_whole_numbers_are_ids_however_they_are_written(rig: Rig) -> None:
    """Also in prompts of completions. Lists of more than 128 items are not searched."""
    rig.generator.will(*one_by_one([10, 11]))
    assert (await rig.post(CHAT, ASKED | {"input_ids": [5.0, 300, 6.0]}))[0] == 200
    prompts: list[Any] = [[5.0, 300, 6.0], [[5, 300.0, 6]], [[5.0, 300, 6], "a"]]
    for prompt in prompts:
        status, answer, _ = await rig.post("/v1/completions", {"prompt": prompt})
        assert status == 200, answer
    asked = [list(each.token_ids) for each in rig.generator.requests]
    assert [ids for ids in asked if 300 in ids] == [[5, 300, 6]] * 4
    wrong: list[Any] = [[5.5], [[5.5]], [1e99], [5.0] * 129, [True, 5.0], [None]]
    for prompt in wrong:
        status, answer, _ = await rig.post("/v1/completions", {"prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_answers_are_parsed_all_the_same(serve: Serve) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    rig.generator.will(*one_by_one(rig.tokenizer.encode(OBJECT_CALLS, False)))
    _, answer, _ = await rig.post(CHAT, ASKED | {"tools": TOOLS})
    assert [each["function"]["name"] for each in answer["choices"][0]["message"]["tool_calls"]]


@pytest.mark.parametrize(
    "wrong",
    [[], "AAAA", [1, "a"], [True], [1.5], [SERVED.vocab_size], [-1], [1 << 40], [5] * SERVED.max_model_len],
)
async def test_what_is_no_prompt_is_refused(rig: Rig, wrong: Any) -> None:
    status, answer, _ = await rig.post(CHAT, ASKED | {"input_ids": wrong})
    assert (status, answer["error"]["param"]) == (400, "input_ids")


async def test_images_have_no_place_in_it(rig: Rig) -> None:
    chat = ASKED | {"messages": [{"role": "user", "content": [IMAGE]}]}
    status, answer, _ = await rig.post(CHAT, chat)
    assert (status, answer["error"]["param"]) == (400, "input_ids")
