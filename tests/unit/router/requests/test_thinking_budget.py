"""Limits of reasoning tokens over HTTP, under every name: what the nodes get, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.grammar import GrammarCompiler
from common.grammar.token_marker import TokenMarker
from common.messages.generation import ThinkingLimit
from router.chat.answer_style import PLAIN, AnswerStyle
from router.chat.call_formats import CALL_FORMATS
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.chat.wire_formats import TOOLS, template_of
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "Hi"},
    GENERATE: {"text": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
}
# Tokens of the tiny model stand for the markers, which it lacks.
BEGIN, END = 600, 601
STYLE = AnswerStyle(
    template_of("qwen3"),
    special={"<think>": BEGIN, "</think>": END},
    calls=CALL_FORMATS["qwen3"],
    think_markers=(TokenMarker([BEGIN]), TokenMarker([END])),
)
# Markers of several tokens.
LONG = replace(STYLE, special={}, think_markers=(TokenMarker([BEGIN, 8]), TokenMarker([END, BEGIN, 8, END])))
SCHEMA = {"type": "json_object"}
UNLIMITED = {"sampling_params": {"json_schema": "{}"}}
# Special tokens of the tiny model, which no text of a grammar matches.
OPEN, CLOSE, EOS = 3, 4, 2
COMPILER = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [EOS])


@pytest.fixture
async def rig(serve: Serve) -> Rig:
    made = await serve(served=replace(SERVED, answers=STYLE))
    made.generator.will(*one_by_one([331]))
    return made


def limit(rig: Rig) -> ThinkingLimit | None:
    """Return the limit that the nodes got with the latest request."""
    rules = rig.generator.requests[-1].sampling.token_rules
    return None if rules is None else rules.thinking


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"custom_params": {"thinking_budget": 7}}, 7),
        (CHAT, {"reasoning": {"max_tokens": 7}}, 7),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        (CHAT, {"thinking": {"type": "enabled"}}, None),
        (CHAT, {"thinking_token_budget": 9, "custom_params": {"thinking_budget": 7}}, 7),
        (CHAT, {"thinking_token_budget": 0, "stream": True}, 0),
        (CHAT, {"thinking_token_budget": -1}, None),
        (CHAT, {"thinking_token_budget": None, "custom_params": {}}, None),
        (CHAT, {"thinking_token_budget": 7, "separate_reasoning": False}, 7),
        (CHAT, {"thinking_token_budget": 7, "response_format": SCHEMA}, 7),
        (TEXT, {"thinking_token_budget": 7, "response_format": SCHEMA}, 7),
        (CHAT, {"thinking_token_budget": 7, "tools": TOOLS, "tool_choice": "required"}, 7),
        (TEXT, {"thinking_token_budget": 7}, 7),
        (GENERATE, {"sampling_params": {"custom_params": {"thinking_budget": 7}}}, 7),
        (GENERATE, {"sampling_params": [{"thinking_token_budget": 7}], "text": ["Hi"]}, 7),
        (GENERATE, {"max_thinking_tokens": 7}, 7),
        (GENERATE, {"max_thinking_tokens": 7, "sampling_params": {"thinking_token_budget": 9}}, 7),
        (TEXT, {"max_thinking_tokens": 7}, 7),
        (RESPONSES, {"thinking_token_budget": 7}, 7),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        (MESSAGES, {"thinking": {"type": "enabled"}}, None),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None),
        (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
    ],
)
async def test_the_nodes_get_the_limit_and_the_markers(
    path: str, fields: dict[str, Any], tokens: int | None, rig: Rig
) -> None:
    async with rig.session.post(rig.url + path, json=BODIES[path] | fields) as response:
        assert response.status == 200, await response.text()
        await response.read()
    assert limit(rig) == (None if tokens is None else ThinkingLimit(tokens, (BEGIN,), (END,)))


@pytest.mark.parametrize(
    ("prompt", "spent"),
    [
        ([5, BEGIN], 0),
        ([5, BEGIN, 6, 7], 2),
        ([BEGIN, 5, END, 6, BEGIN, 8], 1),
        ([5, BEGIN, 6, END], None),
        ([END, 5], None),
        ([5], None),
    ],
)
async def test_the_prompt_may_open_the_reasoning(prompt: list[int], spent: int | None, rig: Rig) -> None:
    """Each prompt of a request has its own count."""
    body = {"prompt": [prompt, [5]], "thinking_token_budget": 7}
    status, answer, _ = await rig.post(TEXT, body)
    assert status == 200, answer
    found = {request.token_ids[-1]: request.sampling.token_rules for request in rig.generator.requests}
    rules, other = found[prompt[-1]], found[5]
    assert rules is not None
    assert other is not None
    if prompt != [5]:
        assert rules.thinking == ThinkingLimit(7, (BEGIN,), (END,), spent)
    assert other.thinking == ThinkingLimit(7, (BEGIN,), (END,))


@pytest.mark.parametrize(
    ("prompt", "spent"),
    [
        ([5, BEGIN, 8], 0),
        ([5, BEGIN, 8, 6, 7], 2),
        ([5, BEGIN, 8, 6, END, BEGIN], 3),
        ([BEGIN, 8, END, BEGIN, 8], 0),
        ([BEGIN, 8, END, BEGIN, 8, END], None),
        ([BEGIN, 5, 8], None),
        ([8], None),
    ],
)
async def test_markers_of_several_tokens_in_the_prompt(
    prompt: list[int], spent: int | None, serve: Serve
) -> None:
    rig = await serve(served=replace(SERVED, answers=LONG))
    rig.generator.will(*one_by_one([331]))
    status, answer, _ = await rig.post(TEXT, {"prompt": prompt, "thinking_token_budget": 7})
    assert status == 200, answer
    assert limit(rig) == ThinkingLimit(7, (BEGIN, 8), (END, BEGIN, 8, END), spent)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"thinking_token_budget": 1 << 31}, "thinking_token_budget"),
        (CHAT, {"thinking_token_budget": "7"}, "thinking_token_budget"),
        (CHAT, {"custom_params": {"thinking_budget": -2}}, "custom_params.thinking_budget"),
        (CHAT, {"custom_params": {"other": 1}}, "custom_params.other"),
        (CHAT, {"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        (CHAT, {"thinking": {"type": "auto"}}, "thinking.type"),
        (CHAT, {"thinking": {"budget_tokens": 7}}, "thinking.type"),
        (CHAT, {"thinking": {"type": "enabled", "display": "full"}}, "thinking.display"),
        (CHAT, {"thinking": {"type": "enabled", "keep": "all"}}, "thinking.keep"),
        (CHAT, {"thinking": {"type": "enabled", "clear_thinking": False}}, "thinking.clear_thinking"),
        (CHAT, {"reasoning": {"tokens": 7}}, "reasoning.tokens"),
        (TEXT, {"thinking_token_budget": 7, "allowed_token_ids": [5]}, "allowed_token_ids"),
        (GENERATE, {"max_thinking_tokens": -2}, "max_thinking_tokens"),
        (CHAT, {"max_thinking_tokens": 7}, "max_thinking_tokens"),
        (
            GENERATE,
            {"sampling_params": {"custom_params": {"thinking_budget": -2}}},
            "sampling_params.custom_params.thinking_budget",
        ),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": -2}},
            "thinking.budget_tokens",
        ),
    ],
)
async def test_what_cannot_be_met_is_refused(path: str, fields: dict[str, Any], param: str, rig: Rig) -> None:
    status, answer, _ = await rig.post(path, BODIES[path] | fields)
    assert status == 400
    if path == MESSAGES:
        assert param in answer["error"]["message"]
    else:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "thought", "taken"),
    [
        (TEXT, {"prompt": [5]}, [], True),
        (TEXT, {"prompt": [5]}, [OPEN, 9, CLOSE], True),
        (TEXT, {"prompt": [5]}, [9, CLOSE], False),
        (TEXT, {"prompt": [5, OPEN]}, [9, CLOSE], True),
        (TEXT, {"prompt": [5, OPEN, 9]}, [], False),
        (TEXT, {"prompt": [5, OPEN, CLOSE]}, [], True),
        (TEXT, {"prompt": [5, OPEN], "thinking_token_budget": None}, [], True),
        (TEXT, {"prompt": [5, OPEN], "thinking_token_budget": -1}, [9, CLOSE], False),
        (
            TEXT,
            {"prompt": [5, OPEN], "thinking_token_budget": None, "require_reasoning": True},
            [9, CLOSE],
            True,
        ),
        (GENERATE, {}, [OPEN, 9, CLOSE], True),
        (GENERATE, UNLIMITED, [OPEN, 9, CLOSE], False),
        (GENERATE, UNLIMITED | {"require_reasoning": True}, [OPEN, 9, CLOSE], True),
        (GENERATE, UNLIMITED | {"require_reasoning": True}, [9, CLOSE], False),
        (CHAT, {"separate_reasoning": False}, [OPEN, 9, CLOSE], True),
        (CHAT, {"separate_reasoning": False}, [], True),
        (CHAT, {"separate_reasoning": False, "thinking_token_budget": -1}, [OPEN, 9, CLOSE], False),
    ],
)
async def test_with_a_limit_structured_output_follows_the_reasoning(
    path: str, fields: dict[str, Any], thought: list[int], taken: bool, serve: Serve
) -> None:
    special = {"<think>": OPEN, "</think>": CLOSE}
    style = replace(STYLE, special=special, think_markers=(TokenMarker([OPEN]), TokenMarker([CLOSE])))
    rig = await serve(served=replace(SERVED, answers=style))
    rig.generator.will(*one_by_one([331]))
    limited = {"thinking_token_budget": 7, "response_format": SCHEMA}
    if path == GENERATE:
        limited = {"sampling_params": {"thinking_token_budget": 7, "json_schema": "{}"}}
    status, answer, _ = await rig.post(path, BODIES[path] | limited | fields)
    assert status == 200, answer
    matcher = COMPILER.matcher(rig.generator.requests[-1].sampling.grammar)
    assert matcher.accept([*thought, *COMPILER.tokenize('{"a": 1}'), EOS]) is taken


async def test_each_prompt_has_a_constraint_of_its_own(rig: Rig) -> None:
    body = {"prompt": [[5, BEGIN], [5], [5, BEGIN]], "thinking_token_budget": 7, "response_format": SCHEMA}
    status, answer, _ = await rig.post(TEXT, body)
    assert status == 200, answer
    grammars = {tuple(each.token_ids): each.sampling.grammar for each in rig.generator.requests}
    assert len(set(grammars.values())) == len(grammars) == 2


async def test_no_token_of_the_marker_may_be_forbidden(serve: Serve, tokenizer: Tokenizer) -> None:
    [word] = tokenizer.encode("t", False)
    style = replace(STYLE, think_markers=(TokenMarker([BEGIN]), TokenMarker([END, word, END])))
    rig = await serve(served=replace(SERVED, answers=style))
    body = BODIES[TEXT] | {"thinking_token_budget": 7, "bad_words": ["t"]}
    status, answer, _ = await rig.post(TEXT, body)
    assert (status, answer["error"]["param"]) == (400, "bad_words")
    assert f"its token ids: {END}, {word}, {END}" in answer["error"]["message"]
    body = BODIES[TEXT] | {"thinking_token_budget": 7, "allowed_token_ids": [word]}
    status, answer, _ = await rig.post(TEXT, body)
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")
    rig.generator.will(*one_by_one([331]))
    assert (await rig.post(TEXT, body | {"allowed_token_ids": [word, END]}))[0] == 200


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (PLAIN, "no response template with reasoning"),
        (AnswerStyle(template_of("qwen2_5")), "no response template with reasoning"),
        (AnswerStyle(template_of("qwen3")), "not fixed texts"),
    ],
)
async def test_a_model_whose_reasoning_cannot_be_ended(style: AnswerStyle, said: str, serve: Serve) -> None:
    """Anthropic's clients must send a budget to switch thinking on: there it has no effect on such a model."""
    rig = await serve(served=replace(SERVED, answers=style))
    rig.generator.will(*one_by_one([331]))
    for path in (CHAT, TEXT, RESPONSES):
        status, answer, _ = await rig.post(path, BODIES[path] | {"thinking_token_budget": 7})
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
        assert said in answer["error"]["message"]
        assert (await rig.post(path, BODIES[path] | {"thinking_token_budget": -1}))[0] == 200
    for thinking in ({"type": "enabled", "budget_tokens": 7}, {"type": "disabled"}):
        assert (await rig.post(MESSAGES, BODIES[MESSAGES] | {"thinking": thinking}))[0] == 200
        assert limit(rig) is None


async def test_a_prompt_past_its_reasoning_has_no_limit(rig: Rig) -> None:
    """A template that leaves thinking out writes an empty section, or the answer continues a message."""
    chat = [*HELLO, {"role": "assistant", "content": "<|im_start|>assistant\n<think>\n\n</think>\n\nSo"}]
    body = {"messages": chat, "continue_final_message": True, "thinking_token_budget": 7}
    status, answer, _ = await rig.post(CHAT, body)
    assert status == 200, answer
    assert limit(rig) is None
