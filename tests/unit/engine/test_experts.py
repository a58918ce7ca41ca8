"""Layers with experts: how their tensors are stored, and what a router does with scores that are hard to decide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.forward.model_runner import load_model
from common.errors import ModelError
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

IDS = torch.arange(20) * 7 % 90


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose layer has routed and shared experts, with a matrix for each."""
    return families.save(families.build("glm4-moe-groups"), tmp_path / "model")


def logits(path: Path) -> torch.Tensor:
    return Driver(load_model(path)[0], [IDS], page_size=4).run_all(None, [20])[0]


def stack(path: Path) -> None:
    """Rewrite the experts of every layer as two stacked tensors."""
    content = load_file(path / "model.safetensors")
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        experts = range(sum(name.startswith(stem) for name in content) // 3)
        gate, up, down = (
            [content.pop(f"{stem}.{j}.{what}_proj.weight") for j in experts]
            for what in ("gate", "up", "down")
        )
        if experts:
            both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            content[f"{stem}.gate_up_proj"] = torch.stack(both)
            content[f"{stem}.down_proj"] = torch.stack(down)
    save_file(content, path / "model.safetensors")


def test_stacked_experts_equal_a_matrix_per_expert(path: Path) -> None:
    before = logits(path)
    stack(path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(path / "model.safetensors")
    assert torch.equal(logits(path), before)


def test_a_missing_expert_is_named(path: Path) -> None:
    content = load_file(path / "model.safetensors")
    del content["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(content, path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"
    ):
        load_model(path)


def test_modules_for_drafts_are_put_aside(path: Path) -> None:
    """GLM checkpoints contain an MTP module as one more layer."""
    before = logits(path)
    content = load_file(path / "model.safetensors")
    content["model.layers.2.eh_proj.weight"] = torch.zeros(48, 96)
    content["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(28, 48)
    save_file(content, path / "model.safetensors")
    assert torch.equal(logits(path), before)


def test_the_correction_stays_float32(path: Path) -> None:
    content = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    content[name] = correction = torch.linspace(1.0, 1.001, 12)
    save_file(content, path / "model.safetensors")
    model, _ = load_model(path, dtype="bfloat16")
    assert torch.equal(model.get_parameter("layers.1.feed_forward.router.correction"), correction)
    assert model.get_parameter("layers.1.feed_forward.router.rows").dtype == torch.bfloat16


def test_each_expert_counts(path: Path) -> None:
    """Shared experts change the logits of every token, and routed ones those of the tokens that chose them."""
    model, config = load_model(path)
    assert config.experts is not None
    before = Driver(model, [IDS], page_size=4).run_all(None, [20])[0]
    down = model.get_parameter("layers.1.feed_forward.experts.down")
    assert len(down) == config.experts.count + config.experts.shared == 14
    changed = []
    for expert in range(len(down)):
        kept = down[expert].clone()
        with torch.no_grad():
            down[expert] *= 1.5
            after = Driver(model, [IDS], page_size=4).run_all(None, [20])[0]
            changed.append(not torch.allclose(after, before, atol=1e-3))
            down[expert] = kept
    assert sum(changed[:12]) >= 3
    assert changed[12:] == [True, True]
