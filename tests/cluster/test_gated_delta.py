"""A Qwen3.5 model on real processes: greedy texts equal those that transformers generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.retracted_answers import complete_until_retracted
from tests.unit.engine import families

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 60
LIKELY = slice(100, 112)  # ids that texts consist of: so few that they repeat, and drafts are found in them
CONFIG: dict[str, Any] = {
    # rounded to 64
    "prefill": {"graphs": "breakable", "chunk_tokens": 7},
    # 18 pages: enough for the longest request, and too few for all of them
    "decode": {"graphs": "full", "max_running": 4, "pool_tokens": 18 * 16, "reserved_tokens": 0},
    "speculation": {"algorithm": "ngram", "steps": 3},
    "transfer": {"transport": "shm"},
}


def save_model(path: Path) -> Any:
    """Write a random model with the tokenizer of another one; return transformers' model."""
    shutil.copytree(
        MODEL, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    )
    theirs = json.loads((MODEL / "config.json").read_text())
    kept = {key: theirs[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = families.build("qwen3.5", **kept, max_position_embeddings=2048)
    unlikely = torch.full((kept["vocab_size"], 1), 0.1)
    unlikely[LIKELY] = 1.0
    with torch.no_grad():
        model.lm_head.weight.mul_(unlikely)
    families.save(model, path)
    return model


@torch.no_grad()
def generated(model: Any, prompt: list[int]) -> list[int]:
    settings = transformers.GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    out = model.generate(torch.tensor([prompt]), generation_config=settings)
    return [int(token) for token in out[0, len(prompt) :]]


async def test_texts_equal_those_of_transformers(
    prompts: list[list[int]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Prompts in chunks, states over the cut, rounds of speculation, retracted requests."""
    model = save_model(tmp_path / "model")
    text = [token for prompt in prompts for token in prompt]
    asked = [text[at : at + count] for at, count in ((0, 65), (70, 129), (200, 200), (410, 1))] * 2
    config = {**CONFIG, "model": {"path": str(tmp_path / "model"), "served_name": "tiny"}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        answers, rounds, counters = await complete_until_retracted(client, asked, TOKENS)
        log = cluster.log("prefill-0")
    expected = [generated(model, prompt) for prompt in asked[:4]] * 2 * rounds
    assert [each.tokens for each in answers] == [[tokenizer.token_text(id) for id in ids] for ids in expected]
    assert "chunk size rounded" in log
    assert counters["spec_accepted_tokens"] > TOKENS
    assert counters["retractions"] > 0
