"""A real cluster used through the real `openai` client, and what the HTTP side reports about it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from deploy.tiny_models.word_problems import take
from tests.cluster.harness import ENV, MODEL, ROOT, Client, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)


def client_of(cluster: RunningCluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600)


async def test_chat_streaming_or_not_gives_the_same_right_answer(cluster: RunningCluster) -> None:
    problem = take(1, 77, "heldout")[0]
    messages: Any = [{"role": "user", "content": problem.question}]
    async with client_of(cluster) as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages, temperature=0)
        pieces: list[str] = []
        usage = None
        async for chunk in await client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            pieces.extend(choice.delta.content or "" for choice in chunk.choices)
    text = whole.choices[0].message.content
    assert text is not None
    assert text.rstrip().endswith(f"#### {problem.value}")
    assert "".join(pieces) == text
    assert whole.choices[0].finish_reason == "stop"
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


async def test_the_same_seed_gives_the_same_text_in_any_batch(cluster: RunningCluster) -> None:
    """This holds when all requests of the batch sample; other seeds give other texts."""
    async with client_of(cluster) as client:

        async def sample(seed: int, prompt: str = "Question: Tom has") -> str:
            answer = await client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=40,
                temperature=1.5,
                top_p=0.95,
                seed=seed,
                extra_body={"top_k": 200},
            )
            return answer.choices[0].text

        alone = await sample(5)
        company = await asyncio.gather(
            sample(5), *(sample(i, f"Question: {i} birds") for i in range(20)), sample(5)
        )
        others = await asyncio.gather(*(sample(seed) for seed in range(100, 106)))
    assert company[0] == company[-1] == alone
    assert len({alone, *others}) > 4


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_share_one_computed_prompt(cluster: RunningCluster, stream: bool) -> None:
    """Each choice equals a request of its own with its seed; beyond the last page the prompt is computed once."""
    count, length, page = 4, 90, 16
    shared = length // page * page
    prompt = [5 + (7 * i + stream) % 600 for i in range(length)]
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 30, "temperature": 1.2}

    async def counters() -> tuple[int, int]:
        async with Client(cluster.url) as status:
            await status.wait_idle()
            nodes = [(await status.node(name))["counters"] for name in ("prefill-0", "decode-0")]
        return nodes[0]["prompt_tokens"] - nodes[0]["cached_tokens"], nodes[1]["cached_tokens"]

    async with client_of(cluster) as client:
        before = await counters()
        texts = dict.fromkeys(range(count), "")
        if stream:
            async for chunk in await client.completions.create(
                **fields, seed=70, n=count, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            whole = await client.completions.create(**fields, seed=70, n=count)
            usage = whole.usage
            texts = {choice.index: choice.text for choice in whole.choices}
        after = await counters()
        single = [await client.completions.create(**fields, seed=70 + i) for i in range(count)]
    assert [texts[i] for i in range(count)] == [each.choices[0].text for each in single]
    assert usage is not None
    assert usage.prompt_tokens == length
    assert len(set(texts.values())) > 1
    assert after[0] - before[0] == length + (count - 1) * (length - shared), "tokens computed"
    assert after[1] - before[1] == (count - 1) * shared, "tokens in pages that the decode node shares"


async def test_log_probabilities_of_prompts_equal_transformers(cluster: RunningCluster) -> None:
    """The requests with which lm-eval measures likelihoods, for several prompts at once, and once more when cached.

    A prompt that fills the context leaves no room for an answer, but for its own log-probabilities.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    short = [
        [5 + (7 * i + number) % 600 for i in range(length)] for number, length in enumerate((2, 40, 300))
    ]
    whole = [[5 + (7 * i) % 600 for i in range(4096)]]
    with torch.inference_mode():
        expected = {
            len(each): model(torch.tensor([each])).logits[0].log_softmax(-1) for each in short + whole
        }
    async with client_of(cluster) as client:
        for prompts, count in ((short, 1), (short, 1), (short, 0), (whole, 0), (whole, 0)):
            answer = await client.completions.create(
                model="tiny", prompt=prompts, max_tokens=count, temperature=0, logprobs=1, echo=True
            )
            for prompt, choice in zip(prompts, answer.choices, strict=True):
                wanted = expected[len(prompt)][:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
                assert choice.logprobs is not None
                first, *found = choice.logprobs.token_logprobs or []
                assert first is None
                of_prompt = torch.tensor(found[: len(prompt) - 1])
                torch.testing.assert_close(of_prompt, wanted, rtol=1e-3, atol=1e-3)
                greedy = [next(iter(top)) for top in (choice.logprobs.top_logprobs or [])[1:]]
                assert len(greedy) == len(found) == len(prompt) - 1 + count


async def test_errors_reach_the_client_in_openais_shape(cluster: RunningCluster) -> None:
    async with client_of(cluster) as client:
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-4", prompt="x")
        with pytest.raises(openai.BadRequestError) as info:
            await client.completions.create(model="tiny", prompt=[1] * 4090, max_tokens=100)
        assert "4096" in str(info.value)
        with pytest.raises(openai.BadRequestError) as info:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], n=3, temperature=0
            )
        assert info.value.param == "n"


async def test_server_info_metrics_and_timeline(cluster: RunningCluster) -> None:
    async with Client(cluster.url) as client:
        headers = {"X-Request-Id": "seen-by-a-person"}
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        async with client.session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "seen-by-a-person"
        await client.wait_idle()
        info = await client.info()
        assert info["model_path"].endswith("tiny-target")
        assert info["config"]["kv.page_size"] == {"value": 16, "origin": "default"}
        assert [state["avg_spec_accept_length"] for state in info["internal_states"]] == [1.0]
        assert {node["name"]: node["state"] for node in info["nodes"]} == {
            "prefill-0": "up",
            "decode-0": "up",
        }
        async with client.session.get("/requests/seen-by-a-person") as response:
            stages = (await response.json())["stages"]
        order = [
            "received",
            "placed",
            "prefill.prefill_start",
            "prefill.prefill_end",
            "prefill.last_page_sent",
            "decode.record_sent",
            "decode.record_seen",
            "decode.record_accepted",
            "decode.step_started",
            "decode.first_decode",
            "finished",
        ]
        assert set(order) <= set(stages)
        assert stages["decode.reserved"] >= 0
        async with client.session.get("/metrics") as response:
            text = await response.text()
        assert 'vllm:num_requests_running{engine="decode-0",model_name="tiny",role="decode"} 0.0' in text
        assert (
            'vllm:request_success_total{engine="router",finished_reason="length",model_name="tiny"}' in text
        )


def test_only_the_router_listens_and_on_one_address(cluster: RunningCluster) -> None:
    """On one host, nodes are reached through socket files that only their owner can open."""
    found = {name: cluster.listens_at(name) for name in cluster.names}
    assert found == {"router": {("127.0.0.1", cluster.port)}, "prefill-0": set(), "decode-0": set()}


async def test_logs_contain_no_text_of_requests_and_answers(cluster: RunningCluster) -> None:
    """No text of a request or an answer is logged, neither for successful requests nor for failed ones."""
    told = "xylophone marmalade"
    async with Client(cluster.url) as client:
        answer = await client.complete(told, 24)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": told}]}
        for refused in ({"max_tokens": 10**6}, {"stop": [told] * 999}, {"temperature": told}):
            async with client.session.post("/v1/chat/completions", json=chat | refused) as response:
                assert response.status == 400
        async with client.session.post("/v1/completions", json={"prompt": told, "stream": True}) as response:
            await response.content.readline()  # then the client disconnects
        await client.wait_idle()
    for name in cluster.names:
        log = cluster.log(name)
        assert log
        for text in ("xylophone", "marmalade", answer.text.strip()):
            assert text not in log, f"{name} has logged it"


async def test_requests_leak_no_descriptor(cluster: RunningCluster) -> None:
    """Neither requests that end nor those whose client disconnects leak descriptors (invariant I5)."""

    def open_ones() -> dict[str, int]:
        directories = {name: f"/proc/{cluster.processes[name].pid}/fd" for name in cluster.names}
        return {name: len(list(Path(directory).iterdir())) for name, directory in directories.items()}

    async def some() -> None:
        async with Client(cluster.url) as client:
            body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
            for _ in range(8):
                async with client.session.post("/v1/completions", json=body) as response:
                    await response.content.readline()
            await client.complete_all([[n, 9] for n in range(5, 21)], 16)
            await client.wait_idle()

    await some()
    before, last = open_ones(), None
    deadline = time.monotonic() + PATIENCE
    while before != last:  # connections of other clients may still close
        assert time.monotonic() < deadline, (before, last)
        await asyncio.sleep(0.2)
        before, last = open_ones(), before
    await some()
    deadline = time.monotonic() + PATIENCE
    while any(count > before[name] for name, count in open_ones().items()):
        assert time.monotonic() < deadline, (before, open_ones())
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("shots", [0, 8])
def test_word_problems_are_solved_through_http(cluster: RunningCluster, shots: int, tmp_path: Path) -> None:
    """At least 0.90 of held-out problems are solved, by chat and by 8-shot prompts."""
    report = tmp_path / "score.json"
    command = [sys.executable, "-m", "deploy.eval_cli", cluster.url, "--count", "20", "--seed", "17"]
    command += ["--shots", str(shots), "--json", str(report)]
    subprocess.run(command, cwd=ROOT, env=ENV, check=True, timeout=600)
    result = json.loads(report.read_text())
    assert (result["count"], result["seed"]) == (20, 17)
    assert result["score"] >= 0.90
