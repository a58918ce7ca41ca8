"""Greedy generation in this process, batched with left padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlavaForConditionalGeneration

from deploy.tiny_models.language_model import LanguageModel


@torch.inference_mode()
def greedy(
    model: LanguageModel | LlavaForConditionalGeneration,
    prompts: Sequence[Sequence[int]],
    pad: int,
    end: int,
    most: int,
    **images: Tensor,
) -> list[list[int]]:
    """Return up to `most` new tokens per prompt; `end` can only be the last of them.

    `images`: what a vision model takes besides, as transformers names it.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    settings = {"do_sample": False, "max_new_tokens": most, "eos_token_id": [end], "pad_token_id": pad}
    untyped: Any = model  # the stubs of transformers refuse `generate` on this class
    config = GenerationConfig.from_dict(settings)
    out = untyped.generate(input_ids=ids, attention_mask=mask, generation_config=config, **images)
    rows: list[list[int]] = out[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
