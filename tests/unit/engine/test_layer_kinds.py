"""Decoder layers by the kinds that their config names: a mixer and a feed-forward, added by one table row each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint.families import FAMILIES, LayerKind
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.layers.attention import Attention
from common.engine.layers.mlp import Mlp
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.model_registry import build_model
from common.kv_cache.layer_kinds import FEED_FORWARDS, MIXERS
from common.kv_cache.pool_spec import pool_spec
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.tiny_model import CONFIG, VOCAB, tiny_model
from tests.fakes.toy_blocks import FAMILY, Experts, LocalMixer
from tests.unit.engine.paged_driver import Driver

PLACEMENT = Placement(torch.float32, torch.device("cpu"))
RAW: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"],
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 16,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "blocks": [["attention", "experts"], ["local", "dense"]],
}
IDS = torch.arange(17) * 7 % 40
SERVED = replace(CONFIG, layer_kinds=(LayerKind("attention", "experts"), LayerKind("local", "dense")))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add table rows for the blocks, and for a family that has them."""
    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", FAMILY)
    monkeypatch.setitem(MIXERS, "local", "tests.fakes.toy_blocks:LOCAL")
    monkeypatch.setitem(FEED_FORWARDS, "experts", "tests.fakes.toy_blocks:Experts")


@pytest.fixture
def path(rows: None, tmp_path: Path) -> Path:
    """Write a random checkpoint of that family."""
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    generator = torch.Generator().manual_seed(0)
    model = build_model(ModelConfig.parse(RAW, tmp_path), PLACEMENT)
    tensors = {piece.name: torch.randn(piece.whole, generator=generator) * 0.3 for piece in model.pieces()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def logits(model: CausalLM, chunk: int | None = None) -> torch.Tensor:
    return Driver(model, [IDS], page_size=4).run_all(chunk, [12])[0]


def test_layers_have_the_blocks_that_the_config_names(path: Path) -> None:
    model, config = load_model(path)
    assert config.layer_kinds == (LayerKind("attention", "experts"), LayerKind("local", "dense"))
    kinds = [
        type(model.get_submodule(f"layers.{i}.{block}"))
        for i in (0, 1)
        for block in ("mixer", "feed_forward")
    ]
    assert kinds == [Attention, Experts, LocalMixer, Mlp]


def test_a_family_without_kinds_has_attention_and_dense_layers(path: Path) -> None:
    model = build_model(ModelConfig.parse({**RAW, "architectures": ["LlamaForCausalLM"]}, path), PLACEMENT)
    for layer in (0, 1):
        assert type(model.get_submodule(f"layers.{layer}.mixer")) is Attention
        assert type(model.get_submodule(f"layers.{layer}.feed_forward")) is Mlp


@pytest.mark.parametrize("chunk", [1, 5])
def test_every_way_of_cutting_gives_the_same_logits(chunk: int, path: Path) -> None:
    model, _ = load_model(path)
    torch.testing.assert_close(logits(model, chunk), logits(model))


@pytest.mark.parametrize("block", ["up", "down", "inward", "outward"])
def test_every_weight_counts(block: str, path: Path) -> None:
    model, _ = load_model(path)
    before = logits(model)
    (owner,) = (each for each in model.modules() if hasattr(each, block))
    part = getattr(owner, block)
    for parameter in [part] if isinstance(part, torch.nn.Parameter) else part.parameters():
        parameter.mul_(1.5)
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_the_pool_holds_what_each_mixer_keeps(path: Path) -> None:
    """The planes follow from the config: the local mixer keeps nothing."""
    spec = pool_spec(ModelConfig.load(path), None, page_size=4, dtype="float32")
    assert [(plane.layer, plane.name, plane.entry) for plane in spec.planes] == [
        (0, "k", (2, 6)),
        (0, "v", (2, 6)),
    ]


def test_the_body_is_compiled_with_other_blocks(path: Path) -> None:
    """A layer without attention leaves no seam: its operations belong to the surrounding piece."""
    model, _ = load_model(path)
    driver = Driver(model, [IDS], page_size=4)
    batch = driver.batch([0], [12])
    driver.runner.attention.plan(batch)
    bodies = CompiledBodies()
    with torch.inference_mode():
        embeds = model.embed(batch.input_ids)
        found = bodies.run_body(model, embeds, batch.positions, driver.runner.attention)
        expected = model(embeds, batch.positions, driver.runner.attention)
    torch.testing.assert_close(found.last, expected.last)
    assert bodies.compilation.pieces == 2


@torch.inference_mode()
def eager(prompt: list[int], count: int) -> list[int]:
    """Return a greedy continuation; everything is recomputed for each token."""
    ids = list(prompt)
    for _ in range(count):
        driver = Driver(tiny_model(config=SERVED), [torch.tensor(ids)], page_size=16)
        ids.append(int(driver.run([0], [len(ids)]).logits[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("graphs", ["breakable", "piecewise"])
def test_both_nodes_serve_the_blocks(graphs: str, rows: None) -> None:
    """Prompt graphs, the hand-over of the existing planes, and decode steps give the tokens of an eager forward."""
    prompts = [[(7 * n + 3 * i) % VOCAB for i in range(n)] for n in (3, 20, 70)]
    with NodeCluster(Shape(model=SERVED, prompt_graphs=graphs)) as cluster:
        calls = [cluster.submit(prompt, 9) for prompt in prompts]
        cluster.run()
        found = [[token.id for token in call.output] for call in calls]
        assert found == [eager(prompt, len(ids)) for prompt, ids in zip(prompts, found, strict=True)]
        assert all(found)
        cluster.settle()
