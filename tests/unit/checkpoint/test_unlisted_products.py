"""MTP modules of checkpoints in FP8 that are dense, wholly or in part, although config.json does not say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.draft_config import with_steps
from common.checkpoint.fp8_weights import Fp8Weights
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import load_mtp
from common.engine.models.mtp import MtpModules
from common.errors import ModelError
from common.speculation.directory import load_draft_config
from tests.fakes.fp8_checkpoint import write_checkpoint
from tests.fakes.fp8_sections import SECTIONS
from tests.fakes.published_mtp import PUBLISHED, save
from tests.fakes.tiny_model import PLACEMENT

LISTED = "modules_to_not_convert"
DELTA = "re:.*in_proj_[ab]$"  # dense in all published files
# Form, and what of its module is dense.
FORMS = {
    "deepseek-names-llama": "model.layers.2",
    "glm-4.5-biases": "eh_proj",
    "qwen3.5": "mtp",
    "qwen3.5-moe-nested": "mtp",
}


def modules(path: Path) -> MtpModules:
    target = load_model(path)[0]
    assert isinstance(target.config.weights, Fp8Weights)
    draft = with_steps(load_draft_config(path, "mtp", ModelConfig.load(path)), 2)
    return load_mtp(path, draft, target, PLACEMENT)


def written(name: str, directory: Path, stacked: bool = False) -> Path:
    """Write a model in FP8 whose module is dense in part; config.json does not say so."""
    saved, dense = save(PUBLISHED[name], directory / "dense"), FORMS[name]
    path = write_checkpoint(
        saved.target, directory / "fp8", {**SECTIONS["tensor-dynamic"], LISTED: ["lm_head", DELTA, dense]}
    )
    if stacked:
        quantised, plain = (
            load_file(path / "model.safetensors"),
            load_file(saved.target / "model.safetensors"),
        )
        kept = {each: value for each, value in quantised.items() if not each.startswith("mtp.")}
        own = {each: value for each, value in plain.items() if each.startswith("mtp.")}
        save_file(kept | own, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"][LISTED].remove(dense)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", FORMS)
def test_products_without_scales_are_dense(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    stored = load_file(path / "model.safetensors")
    loaded = {each.name: each for piece in modules(path).pieces() for each in piece.stored_as(stored)}
    dense = [
        each for each in loaded if each.endswith("_proj.weight") and stored[each].dtype != torch.float8_e4m3fn
    ]
    assert dense
    for each in dense:
        assert torch.equal(loaded[each].into, stored[each][loaded[each].block].to(PLACEMENT.dtype)), each
    codes = [each for each in loaded if stored[each].dtype == torch.float8_e4m3fn]
    assert bool(codes) == (FORMS[name] == "eh_proj")


def test_a_stack_of_experts_is_dense(tmp_path: Path) -> None:
    path = written("qwen3.5-moe-nested", tmp_path, stacked=True)
    found = modules(path).heads[0]
    assert not any(each.dtype == torch.float8_e4m3fn for each in found.layer.parameters())


def test_a_weight_beside_its_scales_is_not_taken_for_a_dense_one(tmp_path: Path) -> None:
    """The file contradicts itself: it is damaged, or was not written as a whole."""
    path = written("glm-4.5-biases", tmp_path)
    stored: dict[str, Tensor] = load_file(path / "model.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    assert f"{name}_scale" in stored
    save_file({**stored, name: stored[name].float()}, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensors of unsupported dtype: {name} F32 \(supported: F8_E4M3\)"):
        modules(path)
