"""What an answer to a chat shows of its prompt: `return_prompt_text` and `echo`, as in vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.tokens.tokenizer import Tokenizer
from tests.unit.router.answers.test_token_ids import chunks
from tests.unit.router.chat.test_chat_tools_http import STYLE
from tests.unit.router.chat.wire_formats import THOUGHT
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hi"}
BEGUN: dict[str, Any] = {
    "messages": [QUESTION, {"role": "assistant", "content": "It "}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "echo": True,
}


async def test_the_text_of_the_prompt(rig: Rig) -> None:
    """In the answer, and in the first event of a stream only."""
    rig.generator.will(*one_by_one([10, 11]))
    body = {"messages": [QUESTION], "return_prompt_text": True}
    for more in ({}, {"return_token_ids": True}):
        _, answer, _ = await rig.post(CHAT, body | more)
        prompt = rig.generator.requests[-1].token_ids
        text = rig.tokenizer.decode(prompt, skip_special_tokens=False)
        assert "hi" in text
        assert answer["prompt_text"] == text
        assert ("prompt_token_ids" in answer) is bool(more)
        first, *others = await chunks(rig, CHAT, body | more)
        assert first["prompt_text"] == text
        assert not any("prompt_text" in each for each in others)
    _, answer, _ = await rig.post(CHAT, body | {"return_prompt_text": False})
    assert "prompt_text" not in answer


@pytest.mark.parametrize("parsed", [False, True])
async def test_what_the_assistant_has_said_precedes_the_answer(
    serve: Serve, tokenizer: Tokenizer, parsed: bool
) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE) if parsed else SERVED)
    said = (THOUGHT if parsed else "") + "rains."
    rig.generator.will(*one_by_one(tokenizer.encode(said, False)))
    for parts in (BEGUN["messages"][1]["content"], [{"type": "text", "text": "It "}]):
        body = BEGUN | {
            "messages": [QUESTION, {"role": "assistant", "content": parts}],
            "n": 2,
            "temperature": 1,
        }
        _, answer, _ = await rig.post(CHAT, body)
        assert [each["message"]["content"] for each in answer["choices"]] == ["It rains."] * 2
        told = [each["choices"][0] for each in await chunks(rig, CHAT, body)]
        for index in (0, 1):
            own = [each["delta"].get("content") or "" for each in told if each["index"] == index]
            assert own[:2] == ["", "It "]
            assert "".join(own) == "It rains."
    plain = (await rig.post(CHAT, BEGUN | {"messages": [QUESTION], "continue_final_message": False}))[1]
    assert plain["choices"][0]["message"]["content"] == "rains."


async def test_the_first_event_of_each_choice_has_the_prompt(rig: Rig) -> None:
    """The next one, with what the assistant has said, does not repeat it."""
    rig.generator.will(*one_by_one([10, 11]))
    body = BEGUN | {"return_prompt_text": True, "return_token_ids": True, "n": 2, "temperature": 1}
    told = await chunks(rig, CHAT, body)
    assert [[name in each for name in ("prompt_text", "prompt_token_ids")] for each in told[:4]] == [
        [True, True],
        [True, True],
        [False, False],
        [False, False],
    ]
    assert [each["choices"][0]["delta"]["content"] for each in told[:4]] == ["", "", "It ", "It "]
