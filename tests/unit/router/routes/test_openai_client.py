"""The `openai` client against the real server: its types and iterators accept our answers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from common.errors import DeadlineExceeded, InternalError, NodeLost, Overloaded, RequestError, Unavailable
from common.messages.generation import SamplingParams
from router.images.loader import Image
from router.requests.image_parts import image_parts
from router.requests.openai_schema import Message
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

TEXT = "The answer is 12 äöü."
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def ids_of(rig: Rig, text: str = TEXT) -> list[int]:
    return rig.tokenizer.encode(text, add_special_tokens=False)


def client_of(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 2])
async def test_chat(rig: Rig, stream: bool, top: int | None) -> None:
    ids = await ids_of(rig)
    rig.generator.will(*one_by_one([*ids, 2], "stop", top))
    options: dict[str, Any] = {} if top is None else {"logprobs": True, "top_logprobs": top}
    async with client_of(rig) as client:
        if stream:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="tiny-target",
                    messages=MESSAGES,
                    stream=True,
                    stream_options={"include_usage": True},
                    **options,
                )
            ]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].choices == []
            text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
            reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
            assert reasons == [None] * (len(reasons) - 1) + ["stop"]
            entries = [e for c in chunks[:-1] if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
            usage = chunks[-1].usage
            assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
        else:
            answer: Any = await client.chat.completions.create(
                model="tiny-target", messages=MESSAGES, **options
            )
            [choice] = answer.choices
            assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
            text, usage = choice.message.content, answer.usage
            entries = choice.logprobs.content if choice.logprobs else []
            assert answer.id.startswith("chatcmpl-")
    assert text == TEXT
    assert (usage.completion_tokens, usage.total_tokens) == (len(ids) + 1, usage.prompt_tokens + len(ids) + 1)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert len(entries) == (0 if top is None else len(ids) + 1)
    if entries:
        assert all(len(entry.top_logprobs) == top for entry in entries)
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == TEXT + "<|end|>"
    [request] = rig.generator.requests
    assert request.sampling.stop_token_ids == (2,)
    prompt = rig.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    # one bos, although the tokenizer adds one too
    assert prompt == "<|bos|><|user|> hi<|end|>\n<|assistant|>"
    assert request.token_ids.count(1) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 2])
async def test_completions(rig: Rig, stream: bool, top: int | None) -> None:
    ids = await ids_of(rig)
    rig.generator.will(*one_by_one(ids, "length", top))
    async with client_of(rig) as client:
        answer: Any = await client.completions.create(
            model="tiny-target", prompt="hi", stream=stream, logprobs=top, max_tokens=len(ids)
        )
        choices = [c.choices[0] async for c in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == TEXT
    assert choices[-1].finish_reason == "length"
    if top is None:
        assert all(choice.logprobs is None for choice in choices)
        return
    parts = [choice.logprobs for choice in choices]
    offsets = [each for part in parts for each in part.text_offset]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids)
    assert all(len(part.text_offset) == len(part.tokens) == len(part.token_logprobs) for part in parts)
    for token, offset in zip([t for part in parts for t in part.tokens], offsets):
        if "\ufffd" not in token:
            assert TEXT[offset:].startswith(token)
    tops = [each for part in parts for each in part.top_logprobs]
    assert all(len(each) == max(top, 1) or top == 2 for each in tops)  # the sampled token is always listed
    assert rig.generator.requests[0].token_ids[0] == 1  # completions add the bos


async def test_token_ids_and_several_prompts(rig: Rig) -> None:
    for word in ("one", "two", "three"):
        rig.generator.will(*one_by_one(await ids_of(rig, word)))
    async with client_of(rig) as client:
        answer = await client.completions.create(model="tiny-target", prompt=[[5, 6], [7], [8]])
    assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "two"), (2, "three")]
    assert [list(r.token_ids) for r in rig.generator.requests] == [[5, 6], [7], [8]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    identities = [request.request_id for request in rig.generator.requests]
    assert len(set(identities)) == 3
    assert all(each.startswith(identities[0]) for each in identities)
    assert answer.id == f"cmpl-{identities[0]}"


async def test_several_prompts_streamed(rig: Rig) -> None:
    for word in ("one", "two"):
        rig.generator.will(*one_by_one(await ids_of(rig, word)))
    texts = {0: "", 1: ""}
    reasons = {}
    async with client_of(rig) as client:
        stream = await client.completions.create(model="tiny-target", prompt=["a", "b"], stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert texts == {0: "one", 1: "two"}
    assert reasons == {0: "length", 1: "length"}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_ends_the_others(rig: Rig, stream: bool) -> None:
    rig.generator.will(delta([5]), 300.0)
    rig.generator.will(0.02, NodeLost("gone"))
    rig.generator.will(delta([6]), 300.0)
    body = {"model": "tiny-target", "prompt": ["a", "b", "c"], "stream": stream}
    if stream:
        raw = await rig.raw("/v1/completions", body)
        assert b'data: {"error":{"message":"gone"' in raw
        assert b"[DONE]" not in raw
    else:
        status, answer, _ = await rig.post("/v1/completions", body)
        assert (status, answer["error"]["message"]) == (503, "gone")
    await rig.settled(3)
    assert [each.batch.failed for each in rig.generator.requests] == [True] * 3


async def test_more_prompts_than_may_be_in_flight_are_refused_for_good(serve: Serve) -> None:
    """The answer is not 503, because a retry could never help."""
    rig = await serve(max_requests=2)
    rig.generator.will(*one_by_one([10]))
    status, answer, headers = await rig.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "this router allows 2 in flight; send the prompts in several" in answer["error"]["message"]
    assert "Retry-After" not in headers
    assert (await rig.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}))[0] == 200


class OneImage:
    """Records how much of a body the server still holds when an answer begins."""

    def __init__(self) -> None:
        self.left: list[int] = []  # bytes

    async def load(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        assert [len(address) for _, address in image_parts(messages)] == [400_000]
        return (Image(b"", bytes(32), 1, 1),)

    @contextmanager
    def hold(self, images: Sequence[Image]) -> Iterator[None]:
        assert len(images) == 1
        readers = [tracemalloc.Filter(True, f"*/{name}.py") for name in ("request_body", "web_request")]
        traces = tracemalloc.take_snapshot().filter_traces(readers).traces
        self.left.append(sum(trace.size for trace in traces))
        yield

    async def close(self) -> None:
        pass


async def test_an_answer_keeps_no_body_beside_its_images(serve: Serve) -> None:
    """Neither the received bytes nor their base64 are kept: `router.images.max_held_mib` counts only decoded files."""
    images = OneImage()
    rig = await serve(served=replace(SERVED, path=str(TINY.with_name("tiny-vision"))), images=images)
    rig.generator.will(*one_by_one([5, 2], "stop"))
    parts = [
        {"type": "image_url", "image_url": {"url": "x" * 400_000}},
        {"type": "text", "text": "What is it?"},
    ]
    tracemalloc.start()
    try:
        status, answer, _ = await rig.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
        )
    finally:
        tracemalloc.stop()
    assert status == 200, answer
    assert images.left[0] < 50_000


async def test_errors_reach_the_client_as_its_own(rig: Rig) -> None:
    rig.generator.will(Unavailable("no node"))
    async with client_of(rig) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny-target", messages=MESSAGES, temperature=-1)
        assert (bad.value.param, bad.value.code) == ("temperature", "400")
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.InternalServerError) as down:
            await client.chat.completions.create(model="tiny-target", messages=MESSAGES, stream=True)
        assert down.value.status_code == 503
        rig.generator.scripts = [[delta([5]), NodeLost("the node went away")]]
        stream: Any = await client.chat.completions.create(
            model="tiny-target", messages=MESSAGES, stream=True
        )
        with pytest.raises(openai.APIError, match="the node went away"):
            [chunk async for chunk in stream]
    assert [m.id async for m in await models(rig)] == ["tiny-target"]


async def models(rig: Rig):  # type: ignore[no-untyped-def]
    async with client_of(rig) as client:
        return await client.models.list()


@pytest.mark.parametrize("chat", [True, False])
async def test_every_sampling_parameter_arrives_as_it_was_meant(rig: Rig, chat: bool) -> None:
    rig.generator.will(*one_by_one([10]))
    standard: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "logit_bias": {"50": 3, "7": -100},
        "max_tokens": 9,
        "seed": 5,
    }
    further: dict[str, Any] = {
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "stop_token_ids": [8],
    }
    async with client_of(rig) as client:
        if chat:
            await client.chat.completions.create(
                model="tiny-target", messages=MESSAGES, extra_body=further, **standard
            )
        else:
            await client.completions.create(model="tiny-target", prompt="hi", extra_body=further, **standard)
    [request] = rig.generator.requests
    assert request.sampling == SamplingParams(
        **{**standard, **further, "logit_bias": ((50, 3.0), (7, -100.0)), "stop_token_ids": (2, 8)}
    )


@pytest.mark.parametrize(
    ("error", "calls"), [(DeadlineExceeded("x"), 1), (InternalError("x"), 1), (Overloaded("x"), 3)]
)
async def test_the_client_repeats_only_what_may_be_repeated(
    rig: Rig, error: RequestError, calls: int
) -> None:
    """By default it would also repeat a 408 and a 500."""
    rig.generator.scripts = [[error]]
    async with client_of(rig) as client:
        again = client.with_options(max_retries=2)
        with pytest.raises(openai.APIStatusError):
            await again.completions.create(model="tiny-target", prompt="hi")
    assert len(rig.generator.requests) == calls
