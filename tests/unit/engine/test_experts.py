"""Layers with experts: how their tensors are stored, and what a router does with scores that are hard to decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.fx.experimental.proxy_tensor import make_fx

from common.checkpoint.experts_config import QWEN_SHARED, parse_experts
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.weight_formats import FORMATS
from common.engine.formats import dense_experts
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.model_registry import build_model
from common.engine.models.model_size import check_model_size
from common.engine.ops.expert_products import expert_parts
from common.engine.ops.route import route_reference
from common.engine.ops.sum_parts import sum_parts_reference
from common.errors import ModelError
from tests.fakes.int8_record import METHOD, ROW, Int8Weights
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


def test_padding_rows_of_a_graph_use_no_expert(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values go to page 0; in a step that reads few experts they would cost as much as requests."""
    driver, seen = Driver(load_model(path)[0], [IDS], page_size=4), []

    def spy(*given: torch.Tensor) -> torch.Tensor:
        seen.append(given[3])
        return expert_parts(*given)

    monkeypatch.setattr(dense_experts, "expert_parts", spy)
    batch = driver.batch([0], [6])
    batch.kv_slots[4:] = torch.tensor([0, 3])
    driver.runner(batch)
    (experts,) = seen
    assert (experts[:4] >= 0).all()
    assert (experts[4:] == -1).all()


RAW = {
    **families.BASE,
    **families.FAMILIES["glm4-moe-groups"][1],
    "architectures": ["Glm4MoeForCausalLM"],
    "dtype": "float32",
}
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "n_routed_experts": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_routed_experts": None}, "num_experts must be a positive integer, found None"),
        ({"n_routed_experts": 10**6}, "n_routed_experts 1000000 is more than the 1024"),
        ({"moe_intermediate_size": "28"}, "moe_intermediate_size must be a positive integer"),
        ({"num_experts_per_tok": 13, "n_group": 1}, "num_experts_per_tok 13 is more than the 12 experts"),
        (
            {"num_experts_per_tok": 7},
            "num_experts_per_tok 7 is more than the 6 experts of topk_group 2 groups",
        ),
        ({"n_group": 5}, "n_group 5 and topk_group 2 do not divide 12 experts"),
        ({"n_group": 12}, "n_group 12 and topk_group 2 do not divide 12 experts into groups of two"),
        ({"topk_group": 5}, "n_group 4 and topk_group 5"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor must be a positive number"),
        ({"n_shared_experts": 100}, "n_shared_experts 100 is more than the 32"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers, found -1"),
        ({**QWEN, "mlp_only_layers": 1}, "mlp_only_layers must be a list of at most 1024 layers, found 1"),
        ({**QWEN, "mlp_only_layers": [7] * 1025}, "mlp_only_layers must be a list of at most 1024 layers"),
        ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ({**QWEN, "quantization_config": {"quant_method": "awq"}}, "quantization awq is not supported"),
    ],
)
def test_configs_are_refused_with_the_key(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        ModelConfig.parse({**RAW, **changes}, tmp_path)


def test_a_shared_expert_has_a_multiple_of_the_width_of_an_expert() -> None:
    """It is computed as that many experts."""
    raw = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config, _ = parse_experts({**raw, "shared_expert_intermediate_size": 24}, QWEN_SHARED, 2, "config.json")
    assert (config.shared, config.width) == (3, 56)
    with pytest.raises(ModelError, match=r"shared_expert_intermediate_size 20 is not 1 to 32 times"):
        parse_experts({**raw, "shared_expert_intermediate_size": 20}, QWEN_SHARED, 2, "config.json")


def test_experts_count_in_the_size_of_a_model(path: Path) -> None:
    """A config whose experts are out of proportion to the weights is refused before memory is allocated."""
    config = ModelConfig.load(path)
    check_model_size(path, config, torch.float32, torch.device("cpu"))
    assert config.experts is not None
    many = replace(config, experts=replace(config.experts, count=1024))
    with pytest.raises(ModelError, match=r"1024 experts of 28 .* make a model of at least"):
        check_model_size(path, many, torch.float32, torch.device("cpu"))


def test_a_format_without_experts_refuses_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, METHOD, ROW)
    config = replace(ModelConfig.load(path), weights=Int8Weights(METHOD, ()))
    with pytest.raises(
        ModelError, match=r"model\.layers\.1: experts are not supported in this weight format"
    ):
        build_model(config, Placement(torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("groups", [1, 3])
def test_a_compiler_may_open_the_router_for_any_number_of_tokens(groups: int) -> None:
    """One trace serves every bucket of prompts: nothing in it is fixed to the number of tokens."""
    rows, correction = torch.randn(7, 8), torch.randn(6)

    def run(x: torch.Tensor) -> torch.Tensor:
        rule = (2, 1, True, True, groups, 1, True, 1e-20, 2.5)
        experts, shares = route_reference(x, rows, correction, None, 0, *rule)
        parts = shares[:, :, None] * x[:, None] + experts[:, :, None]
        return sum_parts_reference(parts, experts)

    traced = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(5, 8))
    for count in (3, 16):
        x = torch.randn(count, 8)
        assert torch.equal(traced(x), run(x))
