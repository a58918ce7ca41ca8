"""Qwen2.5-VL through HTTP: the greedy tokens of transformers, with images of any size, graphs, chunks and drafts."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.eagle import Eagle3Head
from common.speculation.directory import load_draft_config
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes.hostile_images import url
from tests.fakes.qwen_vl import build, flatten, inputs_of, picture, rename, save

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENIZER = MODEL.parent / "tiny-vision"
START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
TEMPLATE = """{%- set seen = namespace(images=0) -%}
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image_url' in part %}{% set seen.images = seen.images + 1 %}
{%- if add_vision_id %}Picture {{ seen.images }}: {% endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ANSWER = 12
Part = str | tuple[int, int]  # text, or an image of this size in pixels
ASKED: tuple[tuple[Part, ...], ...] = (
    ("What is it?",),
    ("Left or right? ", (40, 24), "How many bags?"),
    ((9, 9), "and", (33, 47), "and", (100, 20), "are what?"),
    ((48, 40), "?"),
    ((40, 24), (24, 40)),
)


@dataclass
class Served:
    """A checkpoint directory, a head for it, and the answers of transformers."""

    path: Path
    draft: Path
    prompts: list[list[int]]  # with expanded placeholders
    answers: list[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("served")
    path, tokenizer = root / "qwen", Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (START, IMAGE, END, VIDEO)])
    ids: dict[str, int] = {}
    for each in (START, IMAGE, END, VIDEO):
        token_id = tokenizer.token_to_id(each)
        assert token_id is not None
        ids[each] = token_id
    names = {
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[START],
        "vision_end_token_id": ids[END],
    }
    model = build(outer=names, vocab_size=tokenizer.get_vocab_size())
    plain = [
        token
        for token in range(7, ids[START])
        if (text := tokenizer.decode([token])).isascii() and text.strip()
    ]
    with torch.no_grad():  # answers are plain text and end with their last token
        others = [token for token in range(tokenizer.get_vocab_size()) if token not in set(plain)]
        model.lm_head.weight[others] = 0.0
    save(model, path)
    rename(path, published=True)
    flatten(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    prompts, answers = [], []
    for parts in ASKED:
        pictures = [picture(*part) for part in parts if isinstance(part, tuple)]
        vision = ModelConfig.load(path).vision
        assert vision is not None
        text = ""
        for part in parts:
            if isinstance(part, tuple):
                rows, columns = vision.grid(*part)
                text += START + IMAGE * (rows * columns) + END
            else:
                text += part
        prompt = tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>", add_special_tokens=False).ids
        model.model.rope_deltas = None
        made = model.generate(
            **inputs_of(prompt, pictures, ids[IMAGE]), max_new_tokens=ANSWER, do_sample=False
        )
        prompts.append(prompt)
        answers.append(tokenizer.decode(made[0, len(prompt) :].tolist()))
    return Served(path, head_for(path, root / "head"), prompts, answers)


def head_for(target: Path, path: Path) -> Path:
    """A random EAGLE-3 head, written as a checkpoint: verification is exact whatever it drafts."""
    path.mkdir()
    loaded, config = load_model(target, "float32")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "dtype": "float32",
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.rope.sections)},
    }
    (path / "config.json").write_text(json.dumps(raw))
    # A head is recognised by its tensors, and which it has follows from its config.
    save_file({"fc.weight": torch.zeros(1)}, path / "model.safetensors")
    draft = load_draft_config(path, "eagle3", config)
    head = Eagle3Head(draft, loaded, Placement(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for piece in head.pieces():
        tensors[piece.name] = torch.randn(piece.whole, generator=generator) * 0.2
    save_file(tensors, path / "model.safetensors")
    return path


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return url(out.getvalue())


def body_of(parts: tuple[Part, ...], **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(picture(*part))}}
        for part in parts
    ]
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": ANSWER, "temperature": 0} | fields


async def ask(client: Client, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    async with client.session.post("/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def test_the_answers_are_those_of_transformers(tmp_path: Path, served: Served) -> None:
    """Rows C1 to C5 for positions on three axes, with text and images in the same batches.

    tests/unit/prefill_node/test_image_axes.py tests decoding without drafts.
    """
    config: dict[str, Any] = {
        "model": {"path": str(served.path)},
        "speculation": {"algorithm": "eagle3", "steps": 3, "draft_model_path": str(served.draft)},
        "prefill": {"chunk_tokens": 7, "graphs": "breakable"},
        "kv": {"page_size": 4},
        "decode": {"graphs": "full", "max_running": 2},
    }
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        both = [*range(len(ASKED)), *range(len(ASKED))]  # the second time with cached prefixes
        found = await asyncio.gather(*(ask(client, body_of(ASKED[index])) for index in both))
        for index, answer in zip(both, found, strict=True):
            assert answer["choices"][0]["message"]["content"] == served.answers[index], ASKED[index]
            assert answer["usage"]["prompt_tokens"] == len(served.prompts[index])
        again = await ask(client, body_of(ASKED[2]))
        assert again["choices"][0]["message"]["content"] == served.answers[2]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(served.prompts[2]) // 2
        narrow = await ask(client, body_of(("a", (402, 2))), 400)
        assert narrow["error"]["param"] == "messages[0].content[1].image_url"
        assert "200 times" in narrow["error"]["message"]
        spelled = await ask(client, body_of((f"a {VIDEO}", (16, 16))), 400)
        assert "videos are not supported" in spelled["error"]["message"]
        film = body_of(("a",))
        film["messages"][0]["content"].append(
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}
        )
        assert "'video_url'" in (await ask(client, film, 400))["error"]["message"]
        await client.wait_idle()
        for node in (await client.info())["nodes"]:
            totals = node["counters"]["graphs"]
            assert totals
            assert all(each["replays"] and not each["fallbacks"] for each in totals), totals
