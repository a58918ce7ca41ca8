"""Chats with pictures, and the answers of transformers' random models to them, for tests of real clusters."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from common.checkpoint.model_config import ModelConfig
from tests.cluster.harness import MODEL, Client
from tests.fakes.hostile_images import url
from tests.fakes.qwen_vl import inputs_of, picture, save

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
    """A checkpoint directory, and the answers of transformers."""

    path: Path
    prompts: list[list[int]]  # with expanded placeholders
    answers: list[str]


def write_model(
    path: Path, build: Callable[[dict[str, int], int], Any], likely: Collection[int] | None = None
) -> tuple[Any, Tokenizer]:
    """Write a checkpoint with tokenizer and template; return transformers' model and the tokenizer.

    Args:
        build: makes the model, given the ids of its special tokens by the names of the config, and the vocabulary.
        likely: tokens that answers consist of; None: all plain text.
    """
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    specials = (START, IMAGE, END, VIDEO)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    start, image, end, video = (tokenizer.encode(each, add_special_tokens=False).ids[0] for each in specials)
    names = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    model = build(names, tokenizer.get_vocab_size())
    plain = [
        token for token in range(7, start) if (text := tokenizer.decode([token])).isascii() and text.strip()
    ]
    with torch.no_grad():  # answers are plain text and end with their last token
        others = set(range(tokenizer.get_vocab_size())) - set(plain if likely is None else likely)
        model.lm_head.weight[sorted(others)] = 0.0
    save(model, path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return model, tokenizer


def answered(path: Path, model: Any, tokenizer: Tokenizer) -> Served:
    """Answer the chats `ASKED` with transformers."""
    (image,) = tokenizer.encode(IMAGE, add_special_tokens=False).ids
    vision = ModelConfig.load(path).vision
    assert vision is not None
    prompts, answers = [], []
    for parts in ASKED:
        pictures = [picture(*part) for part in parts if isinstance(part, tuple)]
        text = ""
        for part in parts:
            if isinstance(part, tuple):
                rows, columns = vision.grid(*part)
                text += START + IMAGE * (rows * columns) + END
            else:
                text += part
        prompt = tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>", add_special_tokens=False).ids
        model.model.rope_deltas = None
        made = model.generate(**inputs_of(prompt, pictures, image), max_new_tokens=ANSWER, do_sample=False)
        prompts.append(prompt)
        answers.append(tokenizer.decode(made[0, len(prompt) :].tolist()))
    return Served(path, prompts, answers)


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
