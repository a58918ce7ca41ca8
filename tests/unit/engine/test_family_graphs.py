"""Families with other norms, activations or ropes through graphs: both nodes give the tokens of an eager forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.checkpoint.layer_norms import FOUR_NORMS, POST_NORM
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rope_config import RopeConfig
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.tiny_model import CONFIG, VOCAB, tiny_model
from tests.unit.engine.paged_driver import Driver

LAYERS = CONFIG.num_layers
MODELS = {
    "gemma3": replace(
        CONFIG,
        layer_norms=FOUR_NORMS,
        norm_float32=True,
        norm_offset=True,
        qk_norm=True,
        activation="gelu_tanh",
        embedding_scale=CONFIG.hidden_size**0.5,
        attention_scale=0.4,
        sliding_windows=(6, *(None,) * (LAYERS - 1)),
        window_rope=RopeConfig(theta=100.0),
    ),
    "olmo2": replace(CONFIG, layer_norms=POST_NORM, norm_float32=True, qk_norm=True, qk_norm_whole=True),
    "gated": replace(
        CONFIG,
        norm_float32=True,
        norm_offset=True,
        qk_norm=True,
        output_gate=True,
        rope=RopeConfig(partial=0.5),
    ),
    "phi3": replace(CONFIG, fused=True),
}


@torch.inference_mode()
def eager(model: ModelConfig, prompt: list[int], count: int) -> list[int]:
    """Return a greedy continuation; everything is recomputed for each token."""
    ids = list(prompt)
    for _ in range(count):
        driver = Driver(tiny_model(config=model), [torch.tensor(ids)], page_size=16)
        ids.append(int(driver.run([0], [len(ids)]).logits[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("graphs", ["breakable", "piecewise"])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_decode_graphs_give_the_tokens_of_an_eager_forward(name: str, graphs: str) -> None:
    model = MODELS[name]
    prompts = [[(7 * n + 3 * i) % VOCAB for i in range(n)] for n in (3, 20)]
    with NodeCluster(Shape(model=model, prompt_graphs=graphs)) as cluster:
        calls = [cluster.submit(prompt, 6) for prompt in prompts]
        cluster.run()
        found = [[token.id for token in call.output] for call in calls]
        assert all(found)
        assert found == [eager(model, prompt, len(ids)) for prompt, ids in zip(prompts, found, strict=True)]
        cluster.settle()
