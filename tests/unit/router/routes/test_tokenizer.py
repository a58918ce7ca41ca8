"""Tests /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.chat.answer_style import PLAIN, AnswerStyle
from router.chat.call_formats import CALL_FORMATS
from router.tokens.tokenizer import Tokenizer
from router.tokens.tokenizer_info import MAX_BYTES, tokenizer_info
from tests.unit.router.chat.wire_formats import template_of
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

USER = [{"role": "user", "content": "x"}]


async def test_tokenize_and_back(rig: Rig) -> None:
    text = "Hello é€\0 world"
    status, found, _ = await rig.post("/tokenize", {"model": "tiny-target", "prompt": text})
    assert status == 200
    assert found["tokens"][0] == 1
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 4096)
    _, plain, _ = await rig.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert plain["tokens"] == found["tokens"][1:]
    for skip, shown in ((False, "<|bos|>" + text), (True, text)):
        _, back, _ = await rig.post("/detokenize", {"tokens": found["tokens"], "skip_special_tokens": skip})
        assert back == {"prompt": shown, "text": shown}
    _, back, _ = await rig.post("/detokenize", {"tokens": []})
    assert back == {"prompt": "", "text": ""}
    _, back, _ = await rig.post("/detokenize", {"tokens": found["tokens"], "skip_special_tokens": None})
    assert back["prompt"] == "<|bos|>" + text


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_several_texts_and_back(rig: Rig, prefix: str) -> None:
    """As in SGLang."""
    texts = ["Hello", " a b", ""]
    single = [(await rig.post("/tokenize", {"prompt": text, "return_token_strs": True}))[1] for text in texts]
    _, found, _ = await rig.post(f"{prefix}/tokenize", {"prompt": texts, "return_token_strs": True})
    for name in ("tokens", "count", "token_strs"):
        assert found[name] == [each[name] for each in single]
    body = {"tokens": found["tokens"], "skip_special_tokens": True}
    _, back, _ = await rig.post(f"{prefix}/detokenize", body)
    assert back == {"prompt": texts, "text": texts}
    _, one, _ = await rig.post("/tokenize", {"prompt": ["Hello"]})
    assert (one["tokens"], one["token_strs"]) == ([single[0]["tokens"]], None)


async def test_another_model_is_not_found(rig: Rig) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        for name in ("", SERVED.name, SERVED.path, None):
            assert (await rig.post(path, {**body, "model": name}))[0] == 200
        status, answer, _ = await rig.post(path, {**body, "model": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs.a",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0]",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        # What changes the prompt of a chat, or would.
        ("/tokenize", {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": USER, "documents": [{"text": "x"}]}, "documents"),
        ("/tokenize", {"messages": USER, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/tokenize", {"messages": USER, "reasoning_effort": "x"}, "reasoning_effort"),
        ("/tokenize", {"messages": USER, "tool_choice": "x"}, "tool_choice"),
        ("/tokenize", {"messages": USER, "reasoning": {"effort": "x"}}, "reasoning.effort"),
        ("/tokenize", {"messages": USER, "reasoning": {"tokens": 5}}, "reasoning.tokens"),
        ("/tokenize", {"messages": USER, "thinking": {"type": "x"}}, "thinking.type"),
        ("/tokenize", {"messages": USER, "thinking": {"type": "enabled", "keep": "all"}}, "thinking.keep"),
        ("/tokenize", {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
        ("/tokenize", {"messages": USER, "input_ids": [5]}, "input_ids"),
        ("/tokenize", {"messages": USER, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "x", "truncation_side": "right"}, "truncation_side"),
        ("/tokenize", b'{"prompt":"\\ud800"}', None),
        ("/tokenize", b'{"prompt":"\xff"}', None),
        ("/tokenize", b"[" * 100_000, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [704]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[True]]}, "tokens[0][0]"),
        ("/detokenize", {"tokens": [5, [5]]}, "tokens"),
        ("/detokenize", {"tokens": [[5], [704]]}, "tokens"),
        ("/detokenize", {"tokens": [[5]] * 1025}, "tokens"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["x"] * 1025}, "prompt"),
        ("/tokenize", {"prompt": ["x", 5]}, "prompt[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_refusals(rig: Rig, path: str, body: Any, param: str | None) -> None:
    status, answer, _ = await rig.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_messages_give_the_prompt_of_a_chat(rig: Rig) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rig.generator.will(*one_by_one([5]))
    await rig.post("/v1/chat/completions", {"messages": messages})
    status, found, _ = await rig.post("/tokenize", {"messages": messages})
    assert status == 200
    assert found["tokens"] == list(rig.generator.requests[0].token_ids)
    opened = [*messages, {"role": "assistant", "content": "Hi"}]
    for end in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        await rig.post("/v1/chat/completions", {"messages": opened, **end})
        _, ended, _ = await rig.post("/tokenize", {"messages": opened, **end})
        assert ended["tokens"] == list(rig.generator.requests[-1].token_ids)
    _, special, _ = await rig.post("/tokenize", {"messages": messages, "add_special_tokens": True})
    assert special["tokens"] == [1, *found["tokens"]]


async def test_tools_and_reasoning_change_the_prompt_as_in_a_chat(
    serve: Serve, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    shown = "{{ tools | length if tools else 0 }} {{ reasoning_effort }} {{ enable_thinking }}"
    (tmp_path / "model/chat_template.jinja").write_text(shown)
    style = AnswerStyle(template_of("qwen3"))
    rig = await serve(served=replace(SERVED, path=str(tmp_path / "model"), answers=style))
    tool = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}}
    for fields, expected in (
        ({}, "2  "),
        ({"tool_choice": "none"}, "0  "),
        ({"tool_choice": allowed}, "1  "),
        ({"reasoning_effort": "none"}, "2 none False"),
    ):
        _, found, _ = await rig.post("/tokenize", {"messages": USER, "tools": [tool, other], **fields})
        assert tokenizer.decode(found["tokens"], True) == expected


SHOW_ALL = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.reasoning_content }}</>{% endfor -%}
{%- if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif -%}
{%- for each in (reasoning_effort, enable_thinking, thinking, clear_thinking, date_string) %} {{ each }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
MEMBERS: dict[str, list[Any]] = {
    "tools": [
        [],
        [{"function": {"name": "f"}}, {"function": {"name": "g"}}],
        [{"function": {"name": "f", "strict": True}}, {"function": {"name": "g"}}],
        [{"type": "custom"}],
    ],
    "tool_choice": [
        "auto",
        "none",
        "required",
        "x",
        {"type": "function", "function": {"name": "g"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "g"}}]}},
    ],
    "chat_template_kwargs": [
        {},
        {"enable_thinking": True},
        {"thinking": False, "date_string": "today"},
        {"clear_thinking": None},
        {"other": 1},
        {"thinking": [1]},
    ],
    "reasoning_effort": ["none", "low", "high", 0.5, 0, "x"],
    "reasoning": [
        {},
        {"effort": "none"},
        {"effort": "max", "enabled": False},
        {"enabled": True},
        {"enable": False, "reasoning_effort": "low", "summary": "auto"},
        {"exclude": True, "effort": "x"},
        {"other": 1},
    ],
    "thinking": [
        {"type": "enabled"},
        {"type": "disabled"},
        {"type": "adaptive", "display": "summarized"},
        {"type": "enabled", "clear_thinking": False},
        {"type": "enabled", "other": 1},
        {"type": "x"},
    ],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "add_special_tokens": [True, False],
    "documents": [[], [{"text": "x"}]],
    "chat_template": [None, "{{ 1 }}"],
    "temperature": [0.5],
    "max_tokens": [7],
    "stop": ["x"],
}


QWEN_STYLE = AnswerStyle(template_of("qwen3"), calls=CALL_FORMATS["qwen3"])


@pytest.mark.parametrize(
    "style",
    [
        pytest.param(QWEN_STYLE, id="forced"),
        pytest.param(replace(QWEN_STYLE, calls=None), id="not forced"),
        pytest.param(AnswerStyle(template_of("think")), id="not read"),
        pytest.param(PLAIN, id="not known"),
    ],
)
async def test_random_chats_have_the_prompt_that_tokenize_tells(
    serve: Serve, tmp_path: Path, style: AnswerStyle
) -> None:
    """A chat that is refused for a member of its prompt is refused here with the same words."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(SHOW_ALL)
    allowed = frozenset({"enable_thinking", "thinking", "reasoning_effort", "clear_thinking", "date_string"})
    answers = replace(style, template_variables=allowed)
    served = replace(SERVED, path=str(tmp_path / "model"), answers=answers)
    rig = await serve(served=served, strict_fields=True)
    rig.generator.will(*one_by_one([5]))
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning_content": "z"}]
    rng, answered = random.Random(7), 0
    for _ in range(400):
        names = rng.sample(list(MEMBERS), k=rng.choice((0, 1, 1, 2, 2, 3, 5)))
        body = {"messages": rng.choice((USER, said, [*said, *USER]))}
        body |= {name: rng.choice(MEMBERS[name]) for name in names}
        rig.generator.requests.clear()
        status, chat, _ = await rig.post("/v1/chat/completions", body)
        told, found, _ = await rig.post("/tokenize", body)
        assert (told, status) in ((200, 200), (400, 400)), (body, chat, found)
        if status == 200:
            [asked] = rig.generator.requests
            assert found["tokens"] == list(asked.token_ids), body
            answered += 1
        else:
            assert found["error"]["message"] == chat["error"]["message"], body
    assert 100 < answered < 350


async def test_unknown_fields_are_told_from_known_ones(serve: Serve) -> None:
    rig = await serve(strict_fields=True)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert (await rig.post(path, {**body, "user": "me"}))[0] == 200
        status, answer, _ = await rig.post(path, {**body, "misspelt": 1})
        assert (status, answer["error"]["param"]) == (400, "misspelt")


async def test_token_strings_are_entries_of_the_vocabulary(rig: Rig) -> None:
    _, found, _ = await rig.post("/tokenize", {"prompt": " a", "return_token_strs": True})
    assert found["token_strs"] == ["<|bos|>", "\u0120a"]
    _, found, _ = await rig.post("/tokenize", {"prompt": " a"})
    assert found["token_strs"] is None


async def test_tokenizer_info(rig: Rig) -> None:
    async with rig.session.get(rig.url + "/tokenizer_info") as response:
        found = await response.json()
    assert (found["tokenizer_class"], found["eos_token"]) == ("PreTrainedTokenizerFast", "<|end|>")
    assert found["chat_template"] == (TINY / "chat_template.jinja").read_text()


def test_tokenizer_info_is_bounded_and_names_no_files(tmp_path: Path) -> None:
    given = {
        "added_tokens_decoder": {str(i): {"content": "x" * 100} for i in range(20_000)},
        "name_or_path": "/secret",
        "vocab_file": "/secret",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    answer = tokenizer_info(tmp_path, tmp_path / "own.jinja")
    assert len(answer) < MAX_BYTES
    assert json.loads(answer) == {
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ messages }}",
    }
