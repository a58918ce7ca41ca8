"""Routes of other APIs in front of a real cluster: the same texts, aborts and flushes."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from deploy.tiny_models.word_problems import take
from tests.cluster.harness import RunningCluster, post

pytestmark = pytest.mark.timeout(900)


async def test_all_routes_give_the_same_text(cluster: RunningCluster) -> None:
    problem = take(1, 78, "heldout")[0]
    messages = [{"role": "user", "content": problem.question}]
    async with aiohttp.ClientSession(cluster.url) as session:
        chat = await post(session, "/v1/chat/completions", messages=messages, temperature=0)
        text = chat["choices"][0]["message"]["content"]
        assert text.rstrip().endswith(f"#### {problem.value}")
        answer = await post(session, "/v1/responses", input=problem.question, temperature=0)
        assert answer["output"][0]["content"][0]["text"] == text
        message = await post(session, "/v1/messages", messages=messages, max_tokens=200, temperature=0)
        assert message["content"][0]["text"] == text
        tokens = (await post(session, "/tokenize", messages=messages))["tokens"]
        assert len(tokens) == chat["usage"]["prompt_tokens"] == answer["usage"]["input_tokens"]
        sampling = {"temperature": 0, "max_new_tokens": 200}
        generated = await post(session, "/generate", input_ids=tokens, sampling_params=sampling)
        assert generated["text"] == text
        assert generated["meta_info"]["finish_reason"]["type"] == "stop"


async def test_a_flush_empties_the_prefix_caches(cluster: RunningCluster) -> None:
    body = {"input_ids": [9, 8, 7, 6, 5] * 40, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    async with aiohttp.ClientSession(cluster.url) as session:
        first = await post(session, "/generate", **body)
        again = await post(session, "/generate", **body)
        assert again["meta_info"]["cached_tokens"] > 100
        # A node may still hold the pages of a request that has just ended: such pages are not flushed.
        for _ in range(100):
            async with session.post("/flush_cache", params={"timeout": 60}) as response:
                assert response.status == 200, await response.text()
            flushed = await post(session, "/generate", **body)
            assert flushed["text"] == again["text"] == first["text"]
            if not flushed["meta_info"]["cached_tokens"]:
                break
        else:
            raise AssertionError("the prefix cache is never empty")


async def test_an_abort_ends_one_prompt_of_a_stream(cluster: RunningCluster) -> None:
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    body = {"text": ["Question:"] * 2, "stream": True, "rid": ["one", "two"], "sampling_params": sampling}
    ended = []
    async with aiohttp.ClientSession(cluster.url) as session:
        async with session.post("/generate", json=body) as response:
            lines = response.content.__aiter__()
            await anext(lines)
            async with session.get("/get_load") as answer:
                (load,) = await answer.json()
                assert load["num_reqs"] == 2
            async with session.post("/abort_request", json={"rid": "two"}) as answer:
                assert answer.status == 200
            async for line in lines:
                if b'"type":"abort"' in line:
                    ended.append(json.loads(line.removeprefix(b"data: "))["meta_info"]["id"])
                    async with session.post("/abort_request", json={"rid": "one"}) as answer:
                        assert answer.status == 200
                elif line.strip():
                    last = line
        assert ended == ["two", "one"]
        assert last == b"data: [DONE]\n"
        for _ in range(500):
            async with session.get("/load") as response:
                if await response.json() == {"server_load": 0}:
                    break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the aborted request is still in flight")
        for _ in range(100):  # nodes report at intervals
            async with session.get("/v1/loads") as response:
                (load,) = (await response.json())["loads"]
            if load["num_running_reqs"] == load["num_used_tokens"] == 0:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(f"the aborted requests still hold pages: {load}")
        assert load["max_total_num_tokens"] > load["num_total_tokens"] == 0
