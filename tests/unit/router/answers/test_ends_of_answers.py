"""What ended a choice, a stop string or a token id: `stop_reason` as in vLLM, `matched_stop` as in SGLang."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from router.chat.answer_style import AnswerStyle
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, TOOLS, template_of
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
END = 2  # the model's primary end-of-sequence id
OTHER_END = 3


Matched = str | int | None


async def ends(rig: Rig, path: str, **fields: Any) -> list[tuple[Matched, Matched]]:
    """Return what ended each choice, in both forms, after a check that a stream has the same in its last chunks."""
    body = fields | ({"messages": HI} if path == CHAT else {"prompt": "x"})
    status, answer, _ = await rig.post(path, body)
    assert status == 200, answer
    whole = [(choice["stop_reason"], choice["matched_stop"]) for choice in answer["choices"]]
    raw = (await rig.raw(path, body | {"stream": True})).decode()
    events = [json.loads(line[6:]) for line in raw.split("\n\n") if line and line != "data: [DONE]"]
    chunks = [choice for event in events for choice in event["choices"]]
    last = {each["index"]: each for each in chunks if each["finish_reason"]}
    assert [(last[index]["stop_reason"], last[index]["matched_stop"]) for index in range(len(whole))] == whole
    for chunk in chunks:
        if not chunk["finish_reason"]:
            for name in ("stop_reason", "matched_stop"):
                assert chunk.get(name, "absent") == ("absent" if path == CHAT else None)
    return whole


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stop_string_or_a_listed_id_or_nothing(rig: Rig, path: str) -> None:
    ids = rig.tokenizer.encode("one $ two", add_special_tokens=False)
    rig.generator.will(*[delta([each]) for each in ids], 300.0)
    assert await ends(rig, path, stop=["two", "$"]) == [("$", "$")]
    rig.generator.scripts = [one_by_one([40, 41], "stop")]
    assert await ends(rig, path, stop_token_ids=[7, 41]) == [(41, 41)]
    rig.generator.scripts = [one_by_one([40, END], "stop")]
    assert await ends(rig, path, stop=["two"], stop_token_ids=[41]) == [(None, END)]
    assert await ends(rig, path, stop_token_ids=[END], ignore_eos=True) == [(END, END)]
    rig.generator.scripts = [one_by_one([40, 41], "length")]
    assert await ends(rig, path, stop_token_ids=[41]) == [(None, None)], "max_tokens ended it"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_end_of_the_text_has_a_reason_unless_it_is_the_primary_one(serve: Serve, path: str) -> None:
    rig = await serve(served=replace(SERVED, eos_token_ids=(END, OTHER_END)))
    rig.generator.scripts = [one_by_one([40, OTHER_END], "stop")]
    assert await ends(rig, path) == [(OTHER_END, OTHER_END)]
    assert await ends(rig, path, stop_token_ids=[OTHER_END]) == [(OTHER_END, OTHER_END)]
    rig.generator.scripts = [one_by_one([40, END], "stop")]
    assert await ends(rig, path) == [(None, END)]
    assert await ends(rig, path, stop_token_ids=[END]) == [(None, END)], "it ends the text anyway"
    constrained = {"structured_outputs": {"regex": "a+"}, "ignore_eos": True}
    assert await ends(rig, path, **constrained) == [(None, END)], "ignore_eos has no effect"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_each_choice_has_its_own(rig: Rig, path: str) -> None:
    dollar = rig.tokenizer.encode("$", add_special_tokens=False)
    rig.generator.scripts = [one_by_one([40, 41], "stop"), [delta([40]), delta(dollar), 300.0]] * 2
    asked = {"n": 2, "temperature": 1, "stop": "$", "stop_token_ids": [41]}
    assert await ends(rig, path, **asked) == [(41, 41), ("$", "$")]


async def test_after_an_echoed_prompt(rig: Rig) -> None:
    rig.generator.will(*one_by_one([40, 41], "stop"))
    assert await ends(rig, TEXT, echo=True, stop_token_ids=[41]) == [(41, 41)]
    assert await ends(rig, TEXT, echo=True, max_tokens=0, stop_token_ids=[41]) == [(None, None)]


async def test_of_an_answer_with_calls(serve: Serve) -> None:
    style = AnswerStyle(template_of("qwen3"))
    rig = await serve(served=replace(SERVED, answers=style))
    ids = rig.tokenizer.encode(OBJECT_CALLS, add_special_tokens=False)
    rig.generator.will(*one_by_one([*ids, 7], "stop"))
    assert await ends(rig, CHAT, tools=TOOLS, stop_token_ids=[7]) == [(7, 7)]
    assert await ends(rig, CHAT, tools=TOOLS) == [(None, 7)]
