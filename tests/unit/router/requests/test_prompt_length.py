"""`truncate_prompt_tokens` and `truncation_side` (vLLM) over HTTP: what nodes get of a prompt that is too long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from common.messages.generation import PromptLogprob
from tests.unit.router.conftest import SERVED, Rig
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LENGTH = SERVED.max_model_len
HI = [{"role": "user", "content": "one two three four"}]
IDS = list(range(10, 30))


async def sent(rig: Rig, path: str, **fields: Any) -> list[int]:
    """Return the prompt that the nodes get, after a check that the answer counts it."""
    rig.generator.scripts = [one_by_one([40])]
    body = ({"messages": HI} if path == CHAT else {"prompt": IDS}) | fields
    status, answer, _ = await rig.post(path, body)
    assert status == 200, answer
    tokens = list(rig.generator.requests[-1].token_ids)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    return tokens


@pytest.mark.parametrize("as_text", [False, True])
async def test_the_last_tokens_of_a_completion_are_kept(rig: Rig, as_text: bool) -> None:
    text = "one two three $ four five six"
    prompt, whole = (text, rig.tokenizer.encode(text, True)) if as_text else (IDS, IDS)
    for count in (1, 5, len(whole), len(whole) + 1):
        assert await sent(rig, TEXT, prompt=prompt, truncate_prompt_tokens=count) == whole[-count:]
    assert await sent(rig, TEXT, prompt=prompt, truncate_prompt_tokens=-1) == whole
    left = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
    assert await sent(rig, TEXT, prompt=prompt, **left) == whole[-5:]
    assert await sent(rig, TEXT, prompt=prompt, **left | {"truncation_side": "right"}) == whole[:5]
    assert await sent(rig, TEXT, prompt=prompt, truncation_side="right") == whole


async def test_each_prompt_of_several_is_cut(rig: Rig) -> None:
    rig.generator.scripts = [one_by_one([40])]
    text = "one two three $ four five six"
    body = {"prompt": [text, "one"], "truncate_prompt_tokens": 3, "return_token_ids": True}
    _, answer, _ = await rig.post(TEXT, body)
    expected = [rig.tokenizer.encode(each, True)[-3:] for each in (text, "one")]
    assert [list(each.token_ids) for each in rig.generator.requests] == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_the_last_tokens_of_a_chat_are_kept(rig: Rig) -> None:
    whole = await sent(rig, CHAT)
    assert await sent(rig, CHAT, truncate_prompt_tokens=4) == whole[-4:]
    assert await sent(rig, CHAT, truncate_prompt_tokens=LENGTH) == whole
    rig.generator.scripts = [one_by_one([40])]
    body = {"messages": HI, "truncate_prompt_tokens": 4, "return_token_ids": True}
    _, answer, _ = await rig.post(CHAT, body)
    assert answer["prompt_token_ids"] == whole[-4:]


@pytest.mark.parametrize("large", [False, True])
async def test_all_that_fits_is_kept(rig: Rig, large: bool) -> None:
    """In a large body, text workers cut what the router would not read."""
    ids = [each % SERVED.vocab_size for each in range(40_000 if large else LENGTH + 5)]
    text = "one two " * (20_000 if large else LENGTH)
    encoded = rig.tokenizer.encode(text, True)
    for prompt, whole in ((ids, ids), (text, encoded), ([ids], ids)):
        fitting = {"prompt": prompt, "truncate_prompt_tokens": -1}
        assert await sent(rig, TEXT, **fitting, max_tokens=100) == whole[-(LENGTH - 100) :]
        assert await sent(rig, TEXT, **fitting) == whole[-(LENGTH - 16) :]
        right = fitting | {"truncation_side": "right", "max_tokens": 1}
        assert await sent(rig, TEXT, **right) == whole[: LENGTH - 1]
        assert await sent(rig, TEXT, prompt=prompt, truncate_prompt_tokens=7) == whole[-7:]
    long = [{"role": "user", "content": text}]
    for count, fields in ((LENGTH - 1, {}), (LENGTH - 9, {"max_tokens": 9})):
        assert len(await sent(rig, CHAT, messages=long, truncate_prompt_tokens=-1, **fields)) == count
    completion = {"max_completion_tokens": 9, "max_tokens": 20}
    assert len(await sent(rig, CHAT, messages=long, truncate_prompt_tokens=-1, **completion)) == LENGTH - 9
    assert len(await sent(rig, CHAT, messages=long, truncate_prompt_tokens=LENGTH)) == LENGTH - 1


async def test_echo_shows_what_was_kept(rig: Rig) -> None:
    text = "one two three $ four five six"
    for side in ("left", "right"):
        kept = await sent(rig, TEXT, prompt=text, truncate_prompt_tokens=4, truncation_side=side)
        first = delta([40], "length", cached=0, top=1)
        scores = [PromptLogprob(-float(each), each, (), ()) for each in kept[1:]]
        rig.generator.scripts = [[replace(first, prompt_logprobs=scores)]]
        body = {
            "prompt": text,
            "truncate_prompt_tokens": 4,
            "truncation_side": side,
            "echo": True,
            "logprobs": 0,
        }
        _, answer, _ = await rig.post(TEXT, body)
        [choice] = answer["choices"]
        assert choice["text"] == rig.tokenizer.decode([*kept, 40], True)
        listed = choice["logprobs"]
        assert listed["tokens"] == [rig.tokenizer.token_text(each) for each in (*kept, 40)]
        assert listed["token_logprobs"] == [None, *(-float(each) for each in kept[1:]), -0.5]
        assert rig.generator.requests[-1].sampling.prompt_logprobs == 0


async def test_refusals_name_the_field_and_the_limit(rig: Rig) -> None:
    for path, fields, most in (
        (CHAT, {}, LENGTH),
        (CHAT, {"max_completion_tokens": 96}, LENGTH - 96),
        (TEXT, {"max_tokens": 96}, LENGTH - 96),
        (TEXT, {}, LENGTH),
    ):
        body = ({"messages": HI} if path == CHAT else {"prompt": IDS}) | fields
        for count in (0, -2, most + 1):
            status, answer, _ = await rig.post(path, body | {"truncate_prompt_tokens": count})
            assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
            less = f" less {next(iter(fields))}" if fields else ""
            assert answer["error"]["message"].endswith(f"from 1 to {most}, the length of the context{less}")
        await sent(rig, path, **fields, truncate_prompt_tokens=most)


async def test_a_large_body_is_refused_alike(rig: Rig) -> None:
    for count in (0, LENGTH + 1):
        body = {"prompt": [5] * 40_000, "truncate_prompt_tokens": count}
        status, answer, _ = await rig.post(TEXT, json.dumps(body).encode())
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_kept_token_has_to_exist(rig: Rig) -> None:
    unknown = SERVED.vocab_size
    assert await sent(rig, TEXT, prompt=[unknown, *IDS], truncate_prompt_tokens=5) == IDS[-5:]
    status, answer, _ = await rig.post(TEXT, {"prompt": [unknown, 5], "truncate_prompt_tokens": 2})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_too_many_tokens_for_the_answer_are_still_named(rig: Rig) -> None:
    body = {"prompt": IDS, "truncate_prompt_tokens": -1, "max_tokens": LENGTH + 1}
    status, answer, _ = await rig.post(TEXT, body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_images_are_not_cut(rig: Rig) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [image]}]
    status, answer, _ = await rig.post(CHAT, {"messages": messages, "truncate_prompt_tokens": 5})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "images" in answer["error"]["message"]


async def test_without_max_tokens_a_completion_gets_its_default_or_what_the_context_leaves(rig: Rig) -> None:
    for left, expected in ((LENGTH - 1, 16), (17, 16), (16, 16), (15, 15), (1, 1)):
        await sent(rig, TEXT, prompt=[5] * (LENGTH - left))
        assert rig.generator.requests[-1].sampling.max_tokens == expected
