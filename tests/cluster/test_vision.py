"""Pictures through HTTP: the answers of transformers, over shm and tcp, with graphs, drafts and cut images.

Rows C1 to C5, end to end.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from deploy.eval_cli import data_url, picture_body
from deploy.tiny_models.drafts import files
from deploy.tiny_models.drafts.measure import Answered, rounds_of
from deploy.tiny_models.vision import checkpoint, measure
from deploy.tiny_models.vision.questions import Question, questions
from tests.cluster.harness import MODEL, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores

TARGET, DRAFT = MODEL.parent / "tiny-vision", MODEL.parent / "tiny-vision-eagle3"
STEPS = 5
IMAGE_TOKEN = json.loads((TARGET / "config.json").read_text())["image_token_index"]
EAGLE3 = {"algorithm": "eagle3", "draft_model_path": str(DRAFT), "steps": STEPS}
CASES: dict[str, dict[str, Any]] = {
    "plain-tcp-chunk5-page1": {
        "prefill": {"chunk_tokens": 5},
        "kv": {"page_size": 1},
        "decode": {"read_results": "one_behind"},
        "transfer": {"transport": "tcp"},
    },
    "eagle3-shm-graphs-chunk7-page4": {
        "speculation": EAGLE3,
        "prefill": {"chunk_tokens": 7, "graphs": "breakable"},
        "kv": {"page_size": 4},
        "decode": {"graphs": "full", "max_running": 2},
    },
}

RANKS = {"plain-tcp-chunk5-page1": {"prefill-0": 2, "decode-0": 2}}


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    found = LlavaForConditionalGeneration.from_pretrained(TARGET, dtype=torch.float32)
    return found.requires_grad_(False).train(False)


@pytest.fixture(scope="module")
def replies(model: LlavaForConditionalGeneration) -> list[measure.Reply]:
    """Return greedy answers by transformers: one picture, two pictures and text only, in one batch."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    found = list(measure.answers(model, tokenizer, list(islice(questions(12, "heldout"), 10))))
    assert {len(each.question.images) for each in found} == {0, 1, 2}
    return found


async def ask(client: Client, question: Question, **fields: Any) -> dict[str, Any]:
    async with client.session.post("/v1/chat/completions", json=picture_body(question) | fields) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("case", CASES)
async def test_the_answers_are_those_of_transformers(
    case: str, tmp_path: Path, model: LlavaForConditionalGeneration, replies: list[measure.Reply]
) -> None:
    config = {"model": {"path": str(TARGET)}, **CASES[case]}
    async with (
        RunningCluster(tmp_path, config=config, ranks=RANKS.get(case, {})) as cluster,
        Client(cluster.url) as client,
    ):
        if "speculation" in CASES[case]:  # drafts in batches that mix pictures and text
            answers = await asyncio.gather(*(ask(client, reply.question) for reply in replies))
        else:
            answers = [await ask(client, reply.question) for reply in replies]
        for reply, answer in zip(replies, answers, strict=True):
            assert said(answer) == reply.text.removesuffix("<|end|>"), reply.question.text
            assert answer["usage"]["prompt_tokens"] == len(reply.asked)
            details = answer["usage"]["prompt_tokens_details"]
            assert details.get("image_tokens", 0) == [*reply.asked].count(IMAGE_TOKEN)
        again = await ask(client, replies[0].question)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert said(again) == replies[0].text.removesuffix("<|end|>")
        assert cached >= len(replies[0].asked) - 2 - cluster_page(CASES[case]), (
            "the second request finds the picture by its content"
        )
        await client.wait_idle()
        info = await client.info()
        length = info["internal_states"][0]["avg_spec_verified_length"]
        if "speculation" in CASES[case]:
            assert length == pytest.approx(eager_accept_length(model, [*replies, replies[0]]), abs=1e-6)
            assert length > 4
        if CASES[case].get("prefill", {}).get("graphs") == "breakable":
            (prefill,) = (node for node in info["nodes"] if node["role"] == "prefill")
            totals = prefill["counters"]["graphs"]
            captured = {(each["phase"], each["model"]) for each in totals}
            assert captured == {("prefill", "target"), ("prefill", "draft"), ("encoder", "target")}
            assert all(each["replays"] and not each["fallbacks"] for each in totals), (
                "prompts with pictures replay graphs, too"
            )


@torch.inference_mode()
def eager_accept_length(model: LlavaForConditionalGeneration, replies: list[measure.Reply]) -> float:
    """Return the oracle's accept length of a greedy loop, counting verified tokens past the end of an answer."""
    _, head = files.load_head(DRAFT)
    target = checkpoint.language_model(model)
    tokens = steps = 0
    for reply in replies:
        answered = measure.answered_by(model, reply)
        embeds, ids, end = answered.embeds, list(answered.ids), len(answered.ids) - 1
        assert embeds is not None
        for _ in range(STEPS + 2):  # tokens of plain decoding past the end
            ids.append(int(target(inputs_embeds=embeds[None]).logits[0, -1].argmax()))
            embeds = torch.cat((embeds, target.model.embed_tokens(torch.tensor(ids[-1:]))))
        for each in rounds_of(head, target, [Answered(ids, answered.prompt_tokens, embeds)], STEPS):
            if each.at + 1 < end:
                tokens, steps = tokens + each.accepted + 1, steps + 1
    return tokens / steps


def cluster_page(case: dict[str, Any]) -> int:
    size: int = case.get("kv", {}).get("page_size", 16)
    return size


@pytest.fixture(scope="module")
def vision_cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = {
        "model": {"path": str(TARGET)},
        "router": {"images": {"max_count": 2, "max_pixels": 5_000, "max_bytes": 20_000}},
    }
    with RunningCluster(tmp_path_factory.mktemp("vision_cluster"), config=config) as running:
        yield running


def test_the_encoder_has_run_before_the_first_picture(vision_cluster: RunningCluster) -> None:
    """The prefill node, which has the encoder, runs it once before it serves."""
    lines = [
        json.loads(line) for line in vision_cluster.log("prefill-0").splitlines() if '"warmed up"' in line
    ]
    assert [line["encoder_forwards"] for line in lines] == [1]
    assert '"warmed up"' not in vision_cluster.log("decode-0")


async def test_many_at_once_and_streams(vision_cluster: RunningCluster, replies: list[measure.Reply]) -> None:
    """Batches mix text-only requests and pictures, in any order of arrival."""
    async with Client(vision_cluster.url) as client:
        answers = await asyncio.gather(*(ask(client, reply.question) for reply in replies))
        for reply, answer in zip(replies, answers, strict=True):
            assert said(answer) == reply.text.removesuffix("<|end|>")
        text = ""
        body = picture_body(replies[0].question) | {"stream": True}
        async with client.session.post("/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text += delta.get("content") or ""
        assert text == replies[0].text.removesuffix("<|end|>")
        await client.wait_idle()


async def test_bad_pictures_are_400s_that_name_their_part(
    vision_cluster: RunningCluster, replies: list[measure.Reply]
) -> None:
    good = next(reply for reply in replies if len(reply.question.images) == 1)
    picture = data_url(good.question.images[0])

    async def refused(client: Client, *urls: str, text: str = "What is it?") -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}
        async with client.session.post("/v1/chat/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 400, answer
            error: dict[str, Any] = answer["error"]
            return error

    async with Client(vision_cluster.url) as client:
        head, _, payload = picture.partition(",")
        broken = await refused(client, picture, f"{head},{payload[: len(payload) // 2 // 4 * 4]}")
        assert broken["param"] == "messages[0].content[1].image_url"
        assert "damaged" in broken["message"]
        lying = await refused(client, picture.replace("image/png", "image/jpeg"))
        assert "is image/png" in lying["message"]
        remote = await refused(client, "http://169.254.169.254/latest/meta-data")
        assert "does not fetch images" in remote["message"]
        many = await refused(client, picture, picture, picture)
        assert "at most 2" in many["message"]
        spelled = await refused(client, picture, text="What is <image>?")
        assert spelled["param"] == "messages"
        assert said(await ask(client, good.question)) == good.text.removesuffix("<|end|>")


async def test_pictures_reach_the_nodes_of_a_restarted_router(
    vision_cluster: RunningCluster, replies: list[measure.Reply]
) -> None:
    """The link that carries images reconnects; no node has the picture in its cache."""
    shown = Image.new("RGB", (32, 32), (1, 2, 3))
    question = replace(
        next(each.question for each in replies if each.question.images), images=(np.asarray(shown),)
    )
    async with Client(vision_cluster.url) as client:
        await ask(client, replies[0].question)
    vision_cluster.kill("router")
    vision_cluster.launch("router")
    await vision_cluster.wait_nodes()
    async with Client(vision_cluster.url) as client:
        answers = [said(await ask(client, question)) for _ in range(2)]
        assert answers[0] == answers[1]
        for reply in replies[:4]:
            assert said(await ask(client, reply.question)) == reply.text.removesuffix("<|end|>")
        await client.wait_idle()


async def test_pictures_are_placed_again_when_their_node_dies(
    tmp_path: Path, replies: list[measure.Reply]
) -> None:
    """The router keeps the bytes until the answer is complete and sends them to the node that takes over."""
    config = {"model": {"path": str(TARGET)}}
    async with RunningCluster(tmp_path, prefill=2, config=config) as cluster, Client(cluster.url) as client:
        cluster.kill("prefill-0")
        for reply in replies[:6]:
            assert said(await ask(client, reply.question)) == reply.text.removesuffix("<|end|>")


async def test_a_text_only_model_answers_images_with_400(cluster: RunningCluster) -> None:
    picture = next(each for each in questions(1, "heldout") if each.images)
    async with aiohttp.ClientSession(cluster.url) as session:
        async with session.post("/v1/chat/completions", json=picture_body(picture)) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["param"] == "messages[0].content[0].image_url"
            assert "does not accept images" in error["message"]
