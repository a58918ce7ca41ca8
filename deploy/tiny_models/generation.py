"""Greedy generation in this process, batched with left padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from deploy.tiny_models.language_model import LanguageModel


@torch.inference_mode()
def greedy(
    model: LanguageModel, prompts: Sequence[Sequence[int]], pad: int, end: int, most: int
) -> list[list[int]]:
    """Return up to `most` new tokens per prompt; rows that end earlier are padded after `end`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    settings = {"do_sample": False, "max_new_tokens": most, "eos_token_id": [end], "pad_token_id": pad}
    untyped: Any = model  # the stubs of transformers refuse `generate` on this class
    out = untyped.generate(ids, attention_mask=mask, generation_config=GenerationConfig.from_dict(settings))
    new: list[list[int]] = out[:, width:].tolist()
    return new
