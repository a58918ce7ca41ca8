"""The bytes of streamed answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import NodeLost
from router.answers.openai_form import OpenAiForm
from router.answers.openai_responses import Usage
from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PROMPT = "<|bos|><|user|> hi<|end|>\n<|assistant|>"


async def events(rig: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    """Parse events: each is one line `data: X` and an empty one; X is JSON or [DONE]."""
    raw = (await rig.raw(path, body)).decode()
    assert raw.endswith("\n\n")
    lines = raw[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def spelled(rig: Rig, text: str) -> list[int]:
    return rig.tokenizer.encode(text, add_special_tokens=False)


async def test_chat_bytes(rig: Rig) -> None:
    ids = await spelled(rig, 'a"')
    rig.generator.will(*one_by_one([*ids, 2], "stop"))
    raw = await rig.raw("/v1/chat/completions", CHAT)
    [request] = rig.generator.requests
    created = json.loads(raw.split(b"\n\n")[0][6:])["created"]
    head = (
        f'data: {{"object":"chat.completion.chunk","id":"chatcmpl-{request.request_id}","created":{created},'
        '"model":"tiny-target","system_fingerprint":"tandem","choices":[{"index":0,"delta":'
    )
    assert raw.decode() == (
        head + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"content":"\\""},"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{},"logprobs":null,"finish_reason":"stop","stop_reason":null,"matched_stop":2}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_completion_bytes(rig: Rig) -> None:
    ids = await spelled(rig, "ab")
    rig.generator.will(delta(ids, cached=2), delta([2], "stop"))
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    raw = await rig.raw("/v1/completions", body)
    [request] = rig.generator.requests
    created = json.loads(raw.split(b"\n\n")[0][6:])["created"]
    head = (
        f'data: {{"object":"text_completion","id":"cmpl-{request.request_id}","created":{created},'
        '"model":"tiny-target","system_fingerprint":"tandem","choices":['
    )
    prompt, said = len(request.token_ids), len(ids) + 1
    assert raw.decode() == (
        head + '{"index":0,"text":"ab","logprobs":null,"finish_reason":null,"stop_reason":null,"matched_stop":null}],'
        '"usage":null}\n\n'
        + head + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null,"matched_stop":2}],'
        '"usage":null}\n\n'
        + head + f'],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{said},"total_tokens":{prompt + said},'
        '"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_usage_in_every_chunk(rig: Rig) -> None:
    ids = await spelled(rig, "abc")
    rig.generator.will(*one_by_one(ids))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = await events(rig, "/v1/chat/completions", {**CHAT, "stream_options": options})
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 2, 3, 3, 3] if len(ids) == 3 else sorted(counts) == counts
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)


async def test_usage_in_every_chunk_counts_the_choice_of_the_chunk(rig: Rig) -> None:
    ids = await spelled(rig, "abc")
    rig.generator.will(*one_by_one(ids))
    rig.generator.will(*one_by_one(ids[:1]))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = await events(rig, "/v1/chat/completions", {**CHAT, "n": 2, "stream_options": options})
    assert done == "[DONE]"
    counts: list[list[int]] = [[], []]
    for chunk in chunks[:-1]:
        usage, (choice,) = chunk["usage"], chunk["choices"]
        counts[choice["index"]].append(usage["completion_tokens"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    # Later tokens have been read by the time that a chunk is written, but are not in it.
    assert sorted(counts) == [[0, 1, 1], [0, *range(1, len(ids) + 1), len(ids)]]
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids) + 1


async def test_no_usage_without_being_asked(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    wanted: tuple[dict[str, Any], ...] = (
        {},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
    )
    for options in wanted:
        *chunks, _ = await events(rig, "/v1/chat/completions", CHAT | options)
        assert not any("usage" in chunk for chunk in chunks)


async def test_options_of_a_stream_need_one_unless_they_say_nothing(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    whole = {**CHAT, "stream": False}
    for options, status in (({}, 200), ({"include_usage": False}, 400), ({"include_usage": True}, 400)):
        found, answer, _ = await rig.post("/v1/chat/completions", {**whole, "stream_options": options})
        assert found == status, answer


async def test_error_in_mid_stream_has_no_done(rig: Rig) -> None:
    rig.generator.will(delta([10]), NodeLost("decode node d0 was lost"))
    found = await events(rig, "/v1/chat/completions", CHAT)
    assert found[-1] == {
        "error": {
            "message": "decode node d0 was lost",
            "type": "server_error",
            "param": None,
            "code": "node_lost",
        }
    }
    assert not any(c["finish_reason"] for chunk in found[:-1] for c in chunk["choices"])


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("secret"), TimeoutError("secret"), ConnectionResetError()]
)
@pytest.mark.parametrize("started", [False, True])
async def test_a_defect_ends_the_stream_with_a_generic_error(
    rig: Rig, failure: Exception, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug differs from a disconnected client: the client gets a generic error, and the log has the details."""
    rig.generator.will(*([delta([10])] if started else []), failure)
    with caplog.at_level(logging.ERROR):
        if started:
            error = (await events(rig, "/v1/chat/completions", CHAT))[-1]["error"]
        else:
            status, answer, headers = await rig.post("/v1/chat/completions", CHAT, {"X-Request-Id": "abc"})
            assert (status, headers["x-request-id"]) == (500, "abc")
            error = answer["error"]
    assert "internal error" in error["message"]
    assert "secret" not in str(error)
    assert error["code"] == "internal_error"
    assert [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("part", ['data: {"late": 1}\n\n', 'data: {"late":'])
async def test_a_defect_between_the_last_parts_ends_with_an_event_of_its_own(
    rig: Rig, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made before the defect is sent, and the error is not joined to an unfinished event."""

    def ending(self: OpenAiForm, usage: Usage, with_usage: bool) -> Iterator[bytes]:
        yield b": first\n\n"
        yield part.encode()
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(OpenAiForm, "ending", ending)
    rig.generator.will(delta([10], "stop"))
    *_, first, late, error, empty = (await rig.raw("/v1/chat/completions", CHAT)).decode().split("\n\n")
    assert (first, late, empty) == (": first", part.strip(), "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [[], [10]])
async def test_tokens_that_end_without_a_reason_are_an_error(rig: Rig, stream: bool, said: list[int]) -> None:
    rig.generator.will(*([delta(said)] if said else []))
    body = {**CHAT, "stream": stream}
    if stream and said:
        assert (await events(rig, "/v1/chat/completions", body))[-1]["error"]["type"] == "server_error"
    else:
        assert (await rig.post("/v1/chat/completions", body))[0] == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stop_string_over_token_borders(rig: Rig, stream: bool, path: str) -> None:
    """The stop string never appears; tokens up to the one that completes it count; later ones are dropped."""
    ids = [await spelled(rig, each) for each in ("Hello", " E", "N", "D", "more")]
    rig.generator.will(*[delta(each, top=1) for each in ids], 300.0)
    counted = sum(map(len, ids[:4]))
    body = {"stop": ["END", "zzz"], "stream": stream, "logprobs": True if "chat" in path else 1}
    body |= {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "x"}
    if stream:
        *chunks, usage, _ = await events(rig, path, {**body, "stream_options": {"include_usage": True}})
        usage = usage["usage"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        status, answer, _ = await rig.post(path, body)
        assert status == 200
        choices, usage = answer["choices"], answer["usage"]
    texts = [(c.get("delta") or c.get("message") or c).get("content", c.get("text")) or "" for c in choices]
    assert "".join(texts) == "Hello "
    assert choices[-1]["finish_reason"] == "stop"
    assert usage["completion_tokens"] == counted
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if "chat" in path:
        tokens = [entry["token"] for each in logprobs for entry in each["content"]]
    else:
        tokens = [token for each in logprobs for token in each["tokens"]]
        offsets = [offset for each in logprobs for offset in each["text_offset"]]
        assert offsets[: len(ids[0]) + 1] == [
            len(rig.tokenizer.decode(ids[0][:i], False)) for i in range(len(ids[0]) + 1)
        ]
        assert offsets[-2:] == [7, 8]  # "N" and "D", although their text was held back
    assert len(tokens) == counted
    assert "".join(tokens) == "Hello END"
    await rig.settled(1)


async def test_a_stop_token_shows_only_when_asked_for(rig: Rig) -> None:
    [dot] = await spelled(rig, ".")
    ids = await spelled(rig, "ab")
    for include, text in ((False, "ab"), (True, "ab.")):
        rig.generator.scripts = [one_by_one([*ids, dot], "stop")]
        body = {"prompt": "x", "stop_token_ids": [dot], "include_stop_str_in_output": include}
        _, answer, _ = await rig.post("/v1/completions", body)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens"] == len(ids) + 1
    assert rig.generator.requests[0].sampling.stop_token_ids == (2, dot)
    rig.generator.scripts = [one_by_one([*ids, 2], "stop")]
    for skip, text in ((True, "ab"), (False, "ab<|end|>")):
        body = {"prompt": "x", "skip_special_tokens": skip, "include_stop_str_in_output": True}
        _, answer, _ = await rig.post("/v1/completions", body)
        assert answer["choices"][0]["text"] == text


async def test_half_characters_wait(rig: Rig) -> None:
    ids = await spelled(rig, "é€")
    assert len(ids) > 2
    rig.generator.will(*one_by_one(ids))
    *chunks, _ = await events(rig, "/v1/chat/completions", CHAT)
    texts = [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]]
    assert texts == ["é", "€"]
    rig.generator.scripts = [one_by_one(ids[:-1])]
    *chunks, _ = await events(rig, "/v1/chat/completions", CHAT)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "é\ufffd"
    rig.generator.scripts = [[delta(ids[:-1]), delta([], "length")]]  # the reason arrives by itself
    *chunks, _ = await events(rig, "/v1/chat/completions", CHAT)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "é\ufffd"


async def test_streams_have_the_request_id(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    headers = {"X-Request-Id": "my-id"}
    url = rig.url + "/v1/chat/completions"
    async with rig.session.post(url, json=CHAT, headers=headers) as response:
        assert response.headers["X-Request-Id"] == "my-id"
        assert b'"id":"chatcmpl-my-id"' in await response.read()
    assert rig.generator.requests[0].request_id == "my-id"
