"""A table of what is refused and one of what is accepted: field, value, status, param."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.text import service as text_service
from tests.unit.router.conftest import MAX_BODY, SERVED, Rig
from tests.unit.router.scripted_generator import one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAME = object()
BOTH = (CHAT, TEXT)
HUGE = 10**40

STOPS: tuple[Any, ...] = ("", ["a", ""], ["x"] * 17, "x" * 257, {}, 5)
BIASES: tuple[Any, ...] = ("1", None, True, [])
MIXED: tuple[Any, ...] = (["a", []], [[1], [HUGE]])
PROMPTS: tuple[Any, ...] = (
    None,
    [],
    [[]],
    [1, "a"],
    ["a", 1],
    [True],
    [1.5],
    [1, True],
    [[1], [True]],
    [None],
    [["a"]],
    {},
    5,
    [-1],
    [SERVED.vocab_size],
    [2**63],
    [HUGE],
    [1] * 4096,
    [True] * 4096,
    ["x"] * 65,
    "x " * 9000,
)
REFUSED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "tools": ({}, False),
    "tool_choice": ("required", True),
    "functions": ([{}],),
    "function_call": ({"name": "f"},),
    "parallel_tool_calls": ("yes", 1),
    "modalities": (["audio"], ["text", "audio"], "text"),
    "audio": ({"voice": "x"},),
    "chat_template": ("{{ x }}",),
    "add_generation_prompt": (1,),
    "continue_final_message": (0, "x"),
    "documents": ([{}],),
    "web_search_options": ({},),
    "messages": ([], None, {}, "hi", 5),
}
REFUSED: list[tuple[str, str, Any, Any]] = [  # (path, field, value, param; SAME means the field)
    *[
        (path, field, value, SAME)
        for path in BOTH
        for field, values in {
            "temperature": (-0.1, 1_000_001, True, "1", [], 10**400),
            "top_p": (0, 0.0, -1, 1.01, False, "x"),
            "top_k": (-2, 1.5, True, 2**63, HUGE, "5"),
            "max_tokens": (0, -1, 1.5, True, "5", HUGE, 4096),
            "seed": (2**63, -(2**63) - 1, HUGE, 0.5, True, "1"),
            "stop_token_ids": ([-1], [SERVED.vocab_size], [HUGE], list(range(129)), [5] * 129),
            "ignore_eos": (1, "true"),
            "stream": (1, "true", []),
            "stream_options": ({"include_usage": True}, []),  # the first without stream
            "n": (9, True, "1", HUGE, 0, [], {}),
            "best_of": (2, True),
            "presence_penalty": (-2.01, 2.01, 10**400, False, "0", []),
            "frequency_penalty": (-2.01, 2.01, True, "0", {}),
            "repetition_penalty": (0, 1e-300, 0.009, -1, 2.01, True, "1"),
            "min_p": (-0.01, 1.01, False, "0"),
            "min_tokens": (-1, 4096, 0.5, False, "1", HUGE),
            "logit_bias": (
                [], 0, "5", {"5": 100.1}, {"5": -100.1}, {"-1": 1}, {str(SERVED.vocab_size): 1}, {"": 1}, {"x": 1},
                {" 5": 1}, {"05": 1}, {"+5": 1}, {"5.0": 1}, {"\u0665": 1}, {"\u00b2": 1}, {"9" * 5000: 1},
                {str(n): 1 for n in range(1025)},
            ),
            "response_format": ("text", 5),
            "structured_outputs": ({}, "json"),
            "guided_regex": ("a(", 5),
            "guided_grammar": ("x",),
            "guided_choice": ([], "a"),
            "regex": ("a(",),
            "json_schema": ("{", {"type": "strin"}),
            "ebnf": ("root = x",),
            "prompt_logprobs": (21, -1, True, "1"),
            "prompt_embeds": ("eA==", ["eA=="]),
            "priority": (21, -21, False, "0", HUGE),
            "cache_salt": ("", 5, "x" * 1025),
            "session_id": (5, "x" * 1025),
            "echo": (0, 1, "true"),
            "use_beam_search": (True, 0),
            "length_penalty": (0.5, True),
            "bad_words": (["x", ""], ["x"] * 129, "x", ["  "]),
            "allowed_token_ids": ([], [SERVED.vocab_size], [-1], "1", [0] * 16_385),
            "truncate_prompt_tokens": (0, -2, SERVED.max_model_len + 1, True, "5", HUGE),
            "truncation_side": ("middle", "", 1),
            "return_tokens_as_token_ids": (1, "true"),
            "return_token_ids": (1, "true"),
            "lora_path": ("x",),
            "kv_transfer_params": ({"a": 1}, 5),
            "return_hidden_states": (True, "last", 0),
            "request_id": ("", "x" * 129, 5),
            "rid": ("", "x" * 129, ["x", "y"]),
            "routed_experts_start_len": (1, False),
            "stop_regex": ("a+", ["a+"]),
            "vllm_xargs": ({"a": 1},),
        }.items()
        for value in values
    ],
    *[(path, "stop", value, SAME) for path in BOTH for value in STOPS],
    *[(path, "stop", [1], "stop[0]") for path in BOTH],
    *[(path, "logit_bias", {"5": value}, "logit_bias[...]") for path in BOTH for value in BIASES],
    *[(path, "stop_token_ids", ["1"], "stop_token_ids[0]") for path in BOTH],
    *[(path, "bad_words", ["x" * 257], "bad_words[0]") for path in BOTH],
    *[(path, "stop_token_ids", [True], "stop_token_ids[0]") for path in BOTH],
    (CHAT, "max_completion_tokens", 0, SAME),
    (CHAT, "max_completion_tokens", 4096, SAME),
    (CHAT, "reasoning_effort", "huge", SAME),
    (CHAT, "include_reasoning", 1, SAME),
    (CHAT, "separate_reasoning", "no", SAME),
    (CHAT, "chat_template_kwargs", 1, SAME),
    (CHAT, "tools", [{"type": "function"}], "tools[0].function"),
    (CHAT, "tool_choice", {"type": "function"}, "tool_choice.function"),
    (CHAT, "chat_template_kwargs", {"tools": []}, "chat_template_kwargs.tools"),
    (CHAT, "logprobs", 1, SAME),
    (CHAT, "top_logprobs", 1, SAME),  # without logprobs
    (CHAT, "top_logprobs", 21, SAME),
    (CHAT, "top_logprobs", -1, SAME),
    (CHAT, "top_logprobs", True, SAME),
    *[
        (CHAT, field, value, SAME)
        for field, values in REFUSED_IN_CHATS.items()
        for value in values
    ],
    (CHAT, "messages", ["x"], "messages[0]"),
    (CHAT, "messages", [{"content": "x"}], "messages[0].role"),
    (CHAT, "messages", [{"role": 5, "content": "x"}], "messages[0].role"),
    (CHAT, "messages", [{"role": "", "content": "x"}], "messages[0].role"),
    (CHAT, "messages", [{"role": "u" * 65, "content": "x"}], "messages[0].role"),
    (CHAT, "messages", [{"role": "nobody", "content": "x"}], "messages"),  # refused by the template
    (CHAT, "messages", [{"role": "user", "content": 5}], "messages[0].content"),
    (CHAT, "messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    (CHAT, "messages", [{"role": "user", "content": "x"}] * 4097, "messages"),
    (CHAT, "messages", [{"role": "user", "content": "x " * 9000}], "messages"),
    (CHAT, "messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    (CHAT, "messages", [{"role": "user", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    (CHAT, "messages", [{"role": "user", "content": "x", "function_call": {}}], "messages[0].function_call"),
    (TEXT, "logprobs", 21, SAME),
    (TEXT, "logprobs", -1, SAME),
    (TEXT, "logprobs", True, SAME),
    (TEXT, "suffix", "x", SAME),
    (TEXT, "suffix", 0, SAME),
    *[(TEXT, "prompt", value, "prompt[1]") for value in MIXED],
    *[
        (TEXT, "prompt", value, SAME)
        for value in PROMPTS
    ],
]  # fmt: skip

TAKEN: dict[str, list[Any]] = {
    "n": [1, None, 2, 8],
    "prompt_logprobs": [None, 0, 20],
    "best_of": [1],
    "presence_penalty": [0, 0.0, -0.0, 2, -2, 0.1, None],
    "frequency_penalty": [0.0, 2, -2, None],
    "repetition_penalty": [1, 1.0, 0.01, 2, None],
    "min_p": [0, 0.0, 1, 0.05, None],
    "min_tokens": [0, 1, None],
    "logit_bias": [{}, None, {"0": 100}, {"5": -100, "703": 0.5}, {str(n): 0 for n in range(704)}],
    "response_format": [{"type": "text"}, None, {"type": "json_object"}],
    "structured_outputs": [{"json": {}}, None],
    "guided_json": [{"type": "object"}],
    "guided_decoding_backend": ["outlines"],
    "regex": ["a+"],
    "priority": [0, 20, -20, None],
    "use_beam_search": [False],
    "length_penalty": [1.0],
    "temperature": [0, 2, 0.0, 1e-9],
    "top_p": [1, 1e-9],
    "top_k": [0, -1, 1, SERVED.vocab_size + 1, 2**40],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "stop": ["x", [], ["a", "b"], "x" * 256, None, "\0"],
    "stop_token_ids": [[], [0], None],
    "allowed_token_ids": [[0], [703, 5, 5], None],
    "bad_words": [[], ["x", " y"], None],
    "model": ["tiny-target", SERVED.path, "", None],
    "user": ["me", 5, {"deep": [[[]]]}],
    "max_tokens": [1, 4000, None],
    "unknown_field": [1, {"a": []}],
    "metadata": [{"a": "b"}],
    "store": [True],
    "service_tier": ["flex"],
    "vllm_xargs": [None, {}],
    "spaces_between_special_tokens": [True, False],
    "return_hidden_states": [False],
    "routed_experts_start_len": [0, 0.0],
    "stream": [False, None],
}
TAKEN_CHAT: dict[str, list[Any]] = {
    "echo": [False, True, None],
    "return_prompt_text": [False, True, None],
    "reasoning_effort": [0, 0.5, "none", None],
    "tools": [[], None],
    "tool_choice": ["none", "auto", None],
    "parallel_tool_calls": [True, False],
    "functions": [[]],
    "modalities": [["text"]],
    "chat_template_kwargs": [{}],
    "add_generation_prompt": [True, False, None],
    "continue_final_message": [False, True, None],
    "top_logprobs": [0],
    "logprobs": [False],
    "max_completion_tokens": [5],
    "messages": [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "a\u0000b"}],
        [{"role": "user", "content": "x", "name": "bob"}],
        [{"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "audio": None}],
    ],
}
TAKEN_TEXT: dict[str, list[Any]] = {
    "echo": [False, True, None],
    "suffix": ["", None],
    "logprobs": [None, 0, 20],
    "prompt": ["", [0], [703], [1.0], [[1.0]], [[1], [2]], ["a", [5]], "a\u0000b", [1] * 4095],
}


@pytest.fixture(params=["read here", "read by a worker"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every case with a small body, and with one so large that a worker reads it."""
    if request.param == "read by a worker":
        monkeypatch.setattr(text_service, "MAX_READ_HERE", -1)
        monkeypatch.setattr(text_service, "MAX_ENCODED_HERE", -1)


def body_of(path: str, field: str, value: Any) -> dict[str, Any]:
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {**base, field: value}


async def test_unsupported_values_are_refused_by_name(rig: Rig) -> None:
    """Each field is refused by its name. Row B4(d): replaced embeddings are refused."""
    wrong = []
    for path, field, value, param in REFUSED:
        status, answer, headers = await rig.post(path, body_of(path, field, value))
        error = answer.get("error", {})
        code = "context_length_exceeded" if "maximum context" in error.get("message", "") else 400
        expected = (400, field if param is SAME else param, "invalid_request_error", code)
        found = (status, error.get("param"), error.get("type"), error.get("code"))
        if found != expected or not headers.get("x-request-id") or len(error["message"]) > 1100:
            wrong.append((path, field, repr(value)[:80], found, error.get("message", "")[:200]))
    assert not wrong
    assert not rig.generator.requests


@pytest.mark.parametrize("path", BOTH)
async def test_supported_values_are_accepted(rig: Rig, path: str) -> None:
    rig.generator.will(*one_by_one([10]))
    wrong = []
    table = TAKEN | (TAKEN_CHAT if path == CHAT else TAKEN_TEXT)
    for field, values in table.items():
        for value in values:
            status, answer, _ = await rig.post(path, body_of(path, field, value))
            if status != 200:
                wrong.append((field, repr(value)[:80], status, answer))
    assert not wrong


MESSAGES = b'{"messages":[{"role":"user","content":"x"}],'
RAW: list[tuple[bytes, Any]] = [  # (body of a chat request, param)
    (b"", None),
    (b"null", None),
    (b"[]", None),
    (b"{", None),
    (b"\xff\xfe{}", None),
    (b"\xef\xbb\xbf{}", "messages"),
    (MESSAGES + b'"n":1} {}', None),
    (b"{}", "messages"),
    (MESSAGES + b'"temperature":NaN}', None),
    (MESSAGES + b'"temperature":Infinity}', None),
    (MESSAGES + b'"temperature":-Infinity}', None),
    (MESSAGES + b'"temperature":1e999}', "temperature"),
    (MESSAGES + b'"temperature":-1e999}', "temperature"),
    (MESSAGES + b'"seed":' + b"9" * 5000 + b"}", "seed"),
    (MESSAGES + b'"seed":1e999}', "seed"),
    (MESSAGES + b'"cache_salt":"\xff"}', None),
    (MESSAGES + b'"cache_salt":"\\ud800"}', None),
    (MESSAGES + b'"cache_salt":"\\udc00x"}', None),
    (b'{"messages":[{"role":"user","content":"\\ud83d"}]}', None),
    (b'{"messages":[{"role":"user","content":"\xc3("}]}', None),
    (b'{"messages":[{"role":"user","content":"a\nb"}]}', None),  # a raw line break is invalid JSON
    (b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', None),
    (MESSAGES + b'"\xff":1}', None),
    (MESSAGES + b'"\\ud800":1}', None),
    (MESSAGES + b'"user":' + b"[" * 100_000 + b"}", None),
    (MESSAGES + b'"unknown":' + b"[" * 100_000 + b"}", None),
    (MESSAGES + b'"tools":' + b'{"a":' * 100_000 + b"}", None),
    (b"[" * 500_000, None),
    (MESSAGES + b'"user":' + b"[" * 64 + b"]" * 64 + b"}", None),  # 65 levels with the body itself
    (MESSAGES + b'"user":' + b'{"a":' * 64 + b"1" + b"}" * 64 + b"}", None),
    (MESSAGES + b'"user":' + b'[{"]":' * 32 + b"1" + b"}]" * 32 + b"}", None),
]


async def test_refused_bytes(rig: Rig) -> None:
    for raw, param in RAW:
        status, answer, _ = await rig.post(CHAT, raw)
        assert (status, answer["error"]["param"]) == (400, param), (raw[:80], answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x"}, "messages is missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": "x"}], "functions": [{}]},
            "functions is not supported by this version of tandem; send tools",
        ),
    ],
)
async def test_refusals_say_what_to_do(rig: Rig, body: dict[str, Any], message: str) -> None:
    status, answer, _ = await rig.post(CHAT, body)
    assert (status, answer["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (TEXT, {"prompt": [[5], []]}, "prompt[1]"),
        (TEXT, {"prompt": ["a", ""], "add_special_tokens": False}, "prompt[1]"),
        ("/generate", {"input_ids": [[5], []]}, "input_ids[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "input_ids": []}, "input_ids"),
    ],
)
async def test_a_prompt_without_tokens_is_named(
    rig: Rig, path: str, body: dict[str, Any], named: str
) -> None:
    status, answer, _ = await rig.post(path, body)
    assert (status, answer["error"]["param"]) == (400, named)
    assert answer["error"]["message"].startswith(f"{named} ")


async def test_an_empty_body_is_called_empty(rig: Rig) -> None:
    for path in (*BOTH, "/generate", "/v1/responses", "/v1/messages"):
        status, answer, _ = await rig.post(path, b"")
        assert (status, answer["error"]["message"]) == (400, "the body is empty; send a JSON object")


async def test_json_may_nest_64_deep_and_no_deeper(rig: Rig) -> None:
    """Brackets inside strings do not count, however they are escaped; neither do many next to each other."""
    rig.generator.will(*one_by_one([10]))
    for user in (
        b"[" * 63 + b"]" * 63,
        b'{"a":' * 63 + b"1" + b"}" * 63,
        b"[" + b"[],{}," * 1000 + b"0]",
        *(json.dumps(text).encode() for text in ("[" * 1000, '"' + "[" * 1000, '\\"[' * 1000, "\\")),
    ):
        status, answer, _ = await rig.post(CHAT, MESSAGES + b'"user":' + user + b"}")
        assert status == 200, (user[:40], answer)
    status, answer, _ = await rig.post(CHAT, MESSAGES + b'"user":' + b"[" * 64 + b"]" * 64 + b"}")
    assert (status, answer["error"]["code"]) == (400, 400)
    assert "64" in answer["error"]["message"]


async def test_too_many_tokens_have_openais_code(rig: Rig) -> None:
    """Clients look for the code to cut the conversation and try again."""
    long = [{"role": "user", "content": "x " * 9000}]
    for path, body in (
        (TEXT, {"prompt": [5] * 5000}),
        (TEXT, {"prompt": [5] * 4000, "max_tokens": 97}),
        (CHAT, {"messages": long}),
    ):
        status, answer, headers = await rig.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["type"] == "invalid_request_error"
        assert headers["x-should-retry"] == "false"


async def test_the_last_of_two_equal_keys_counts(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    raw = b'{"messages":[{"role":"user","content":"one","content":"two"}],"n":2,"n":1}'
    status, _, _ = await rig.post(CHAT, raw)
    assert status == 200
    assert "two" in rig.tokenizer.decode(rig.generator.requests[0].token_ids, False)


async def test_model(rig: Rig) -> None:
    for model, said in (("gpt-9", "gpt-9"), ("\0", "x00"), ("x" * 500_000, "xxx")):
        for path in BOTH:
            status, answer, _ = await rig.post(path, body_of(path, "model", model))
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (
                404,
                "model",
                "model_not_found",
            )
            assert said in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 1100
    assert (await rig.post(CHAT, body_of(CHAT, "model", 5)))[0] == 400


async def test_context_sentence_has_the_numbers(rig: Rig) -> None:
    prompt = [5] * 4000
    _, answer, _ = await rig.post(TEXT, {"prompt": prompt, "max_tokens": 97})
    assert answer["error"]["param"] == "max_tokens"
    for number in ("4096", "4000", "97"):
        assert number in answer["error"]["message"]
    _, answer, _ = await rig.post(TEXT, {"prompt": [5] * 5000, "max_tokens": 1})
    assert answer["error"]["param"] == "prompt"
    assert "4096" in answer["error"]["message"]
    assert "5000" in answer["error"]["message"]
    _, answer, _ = await rig.post(TEXT, {"prompt": [[5], [6] * 5000], "max_tokens": 1})
    assert answer["error"]["param"] == "prompt[1]", "which of several"
    rig.generator.will(*one_by_one([10]))
    assert (await rig.post(TEXT, {"prompt": prompt, "max_tokens": 96}))[0] == 200
    assert (await rig.post(TEXT, {"prompt": prompt}))[0] == 200
    assert (await rig.post(TEXT, {"prompt": [5] * 4090}))[0] == 200
    assert [r.sampling.max_tokens for r in rig.generator.requests] == [96, 16, 6], "OpenAI's default is 16"


async def test_a_body_that_is_too_large_is_refused(rig: Rig) -> None:
    for path in BOTH:
        status, answer, headers = await rig.post(path, b'{"x":"' + b"a" * MAX_BODY + b'"}')
        assert (status, answer["error"]["code"]) == (413, 413)
        assert headers["x-request-id"]


async def test_neutral_values_in_remedies_are_json(rig: Rig) -> None:
    _, answer, _ = await rig.post(CHAT, body_of(CHAT, "use_beam_search", True))
    assert "send false" in answer["error"]["message"]
    _, answer, _ = await rig.post(CHAT, body_of(CHAT, "modalities", ["audio"]))
    assert json.dumps(["text"]) in answer["error"]["message"]
