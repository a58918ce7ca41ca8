"""A mixture of experts over HTTP, with drafts of a head: exactly the tokens of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.unit.engine import families

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 10
CLEAR = 1e-3  # logits: closer ties may be decided by rounding
CONFIG: dict[str, Any] = {
    "prefill": {"graphs": "breakable", "chunk_tokens": 7},
    "decode": {"graphs": "full", "max_running": 8},
    "kv": {"page_size": 4},
    "speculation": {
        "algorithm": "eagle3",
        "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
        "steps": 3,
    },
}


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the continuation by transformers up to the first near-tie."""
    ids = list(prompt)
    while len(ids) < len(prompt) + TOKENS:
        (first, second), (token, _) = (
            each.tolist() for each in families.reference_logits(model, torch.tensor(ids))[-1].topk(2)
        )
        if first - second < CLEAR:
            break
        ids.append(token)
    return ids[len(prompt) :]


async def test_experts_are_served(prompts: list[list[int]], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Groups, shared experts, a dense layer before them, a tensor per expert; a head made for another target."""
    tiny = json.loads((MODEL / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id")
    theirs = families.build("glm4-moe-groups", **{key: tiny[key] for key in sizes})
    path = tmp_path / "model"
    shutil.copytree(MODEL, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    families.save(theirs, path)
    asked = prompts[40:80:5]
    expected = [[tokenizer.token_text(token) for token in greedy(theirs, prompt)] for prompt in asked]
    assert sum(map(len, expected)) > 4 * TOKENS
    config = {**CONFIG, "model": {"path": str(path), "served_name": "tiny"}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(asked, 4, TOKENS)
    for answer, texts in zip(answers, expected, strict=True):
        assert answer.tokens[: len(texts)] == texts
