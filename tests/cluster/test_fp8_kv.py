"""Pages in FP8 with a checkpoint's scales: real processes give the tokens of one process that rounds alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.kv_scales import kv_scales
from common.engine.forward.model_runner import load_model
from common.kv_cache.kv_values import FP8, KvValues
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes.eager_reference import greedy_until_a_tie

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 12
CONFIG: dict[str, Any] = {
    "kv": {"dtype": "fp8"},
    "prefill": {"graphs": "breakable", "chunk_tokens": 64},
    "decode": {"graphs": "full", "max_running": 8},
    "transfer": {"transport": "tcp"},
    "speculation": {
        "algorithm": "eagle3",
        "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
        "steps": 3,
    },
}


async def test_pages_in_fp8_over_tcp(prompts: list[list[int]], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = shutil.copytree(MODEL, tmp_path / "scaled")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.05)
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([0.01])
    save_file(tensors, path / "model.safetensors")
    scales = kv_scales(path)
    assert scales == {(0, "k"): 2**-4, (1, "v"): 2**-6}

    asked = prompts[50:80:9]
    model, _ = load_model(path)
    reference = greedy_until_a_tie(model, asked, TOKENS, KvValues(FP8, scales))
    expected = [[tokenizer.token_text(token) for token in ids] for ids in reference]
    config = {**CONFIG, "model": {"path": str(path), "served_name": "tiny"}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(asked, 4, TOKENS)
        await client.wait_idle()
        info = await client.info()
        node = await client.node("decode-0")
    assert sum(map(len, expected)) > 2 * TOKENS
    assert [answer.tokens[: len(ids)] for answer, ids in zip(answers, expected, strict=True)] == expected
    assert node["config"]["kv_dtype"] == "float8_e4m3fn"
    (state,) = info["internal_states"]
    assert state["avg_spec_accept_length"] > 1.5, state
