"""Weights in FP8: a cluster serves them with exactly the tokens of one process that quantises alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.engine.forward.model_runner import load_model
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes.eager_reference import greedy_until_a_tie

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 12
CONFIG: dict[str, Any] = {
    "model": {"path": str(MODEL), "served_name": "tiny", "quantization": "fp8"},
    "prefill": {"graphs": "breakable", "chunk_tokens": 64},
    "decode": {"graphs": "full", "max_running": 8},
    "speculation": {
        "algorithm": "eagle3",
        "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
        "draft_quantization": "fp8",
        "steps": 3,
    },
}


async def test_weights_are_quantised_at_load_time_and_served(
    prompts: list[list[int]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Prompts in chunks through breakable graphs, decode steps in full graphs, and a draft in FP8 as well."""
    asked = prompts[50:80:6]
    reference = greedy_until_a_tie(load_model(MODEL, quantization="fp8")[0], asked, TOKENS)
    expected = [[tokenizer.token_text(token) for token in ids] for ids in reference]
    async with RunningCluster(tmp_path, config=CONFIG) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(asked, 4, TOKENS)
        await client.wait_idle()
        info = await client.info()
        node = await client.node("decode-0")
    assert sum(map(len, expected)) > 2 * TOKENS
    assert [answer.tokens[: len(ids)] for answer, ids in zip(answers, expected, strict=True)] == expected
    assert node["config"]["weights"] == "fp8 (per channel, dynamic activations, quantised at load time)"
    (state,) = info["internal_states"]
    assert state["avg_spec_accept_length"] > 1.5, state
