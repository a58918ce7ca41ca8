"""Draft heads as they are published: their logits equal those of transformers' layers, and other forms are refused.

Each form is a replica of the config keys and tensor names of public checkpoints, at small sizes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint.model_config import ModelConfig
from common.engine.models.model_size import check_draft_size
from common.errors import ModelError
from common.speculation.directory import algorithm_of, load_draft_config
from tests.fakes.published_heads import (
    FORMS,
    LLAMA_NAME,
    Form,
    compare_logits,
    tensors_of,
    write_head,
    write_target,
)


def kind(form: Form) -> str:
    return "eagle3" if form.eagle3 else "eagle"


@pytest.mark.parametrize("name", FORMS)
def test_logits_equal_those_of_transformers_layers(name: str, tmp_path: Path) -> None:
    compare_logits(FORMS[name], tmp_path, kind(FORMS[name]))


def test_only_an_lm_head_of_its_own_counts_in_the_size_of_a_head(tmp_path: Path) -> None:
    """A head that drafts every token may share the target's, which may be larger than the rest of it."""
    target = ModelConfig.load(write_target(tmp_path / "target"))
    path = write_head(FORMS["eagle3-head-of-the-target"], tmp_path / "head")
    draft = load_draft_config(path, "eagle3", target)
    large = replace(draft, model=replace(draft.model, vocab_size=1 << 24), draft_vocab=1 << 24)
    check_draft_size(path, large)
    with pytest.raises(ModelError, match="draft_vocab_size 16777215 make a model of at least"):
        check_draft_size(path, replace(large, draft_vocab=(1 << 24) - 1))


@pytest.mark.parametrize("name", FORMS)
def test_tensors_decide_the_algorithm(name: str, tmp_path: Path) -> None:
    """Many heads have the architecture of a language model in config.json."""
    path, target = write_head(FORMS[name], tmp_path / "head"), write_target(tmp_path / "target")
    assert algorithm_of(path, target) == kind(FORMS[name])
    other = {"eagle3": "eagle", "eagle": "standalone"}[kind(FORMS[name])]
    with pytest.raises(ModelError, match=f"set speculation.algorithm to {kind(FORMS[name])}"):
        load_draft_config(path, other, ModelConfig.load(target))


def test_a_head_is_judged_by_its_config_before_its_weights_are_downloaded(tmp_path: Path) -> None:
    path = write_head(FORMS["eagle3-named-llama"], tmp_path / "head")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=rf"found pytorch_model.bin; .*deploy/convert {path}"):
        algorithm_of(path, path)
    (path / "pytorch_model.bin").unlink()
    assert algorithm_of(path, tmp_path) == "standalone"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 4}, (4,)),
        ({"sliding_window": 4, "use_sliding_window": False}, (None,)),
        ({"sliding_window": None, "use_sliding_window": True}, (None,)),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, (None,)),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 36}, (4,)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    """A window that is not read would only lower the accept length."""
    form = FORMS["eagle3-named-llama"]
    path = write_head(Form({**form.config, **changes}), tmp_path / "head")
    target = ModelConfig.load(write_target(tmp_path / "target"))
    assert load_draft_config(path, "eagle3", target).model.sliding_windows == windows


@pytest.mark.parametrize(
    ("types", "sentence"),
    [
        (["sliding_attention", "full_attention"], "layer_types names 2 layers, the head has 1"),
        (["chunked_attention"], "layer_types must name sliding_attention, full_attention, found"),
        ([], "layer_types names 0 layers, the head has 1"),
    ],
)
def test_windows_that_cannot_be_told_are_refused(types: list[str], sentence: str, tmp_path: Path) -> None:
    config = {**FORMS["eagle3-named-llama"].config, "sliding_window": 4, "layer_types": types}
    path = write_head(Form(config), tmp_path / "head")
    with pytest.raises(ModelError, match=sentence):
        load_draft_config(path, "eagle3", ModelConfig.load(write_target(tmp_path / "target")))


@pytest.mark.parametrize(
    ("config", "names", "form"),
    [
        ({"architectures": ["DFlashDraftModel"]}, ["hidden_norm.weight"], "a DFlash draft"),
        (
            {**LLAMA_NAME, "dflash_config": {"block_size": 16}},
            ["hidden_norm.weight"],
            "a DFlash draft",
        ),
        ({"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}, [], "a DFlash draft"),
        ({"architectures": ["Qwen3DSparkModel"]}, [], "a DSpark draft"),
        (LLAMA_NAME, ["markov_head.markov_w1.weight"], "a DSpark draft"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["mask_hidden"], "a P-EAGLE head"),
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            ["midlayer.self_attn.kv_a_proj_with_mqa.weight"],
            r"latent attention \(MLA\)",
        ),
        # SpecForge, configs/qwen3-30B-A3B-eagle3-moe-draft.json
        (
            {"architectures": ["Qwen3MoEForCausalLMEagle3"]},
            ["midlayer.mlp.experts.0.gate_proj.weight"],
            "an EAGLE head with a mixture of experts",
        ),
    ],
)
def test_other_forms_are_refused_by_name(
    config: dict[str, Any], names: list[str], form: str, tmp_path: Path
) -> None:
    path = write_head(FORMS["eagle3-named-llama"], tmp_path / "head")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **config}))
    tensors = tensors_of(FORMS["eagle3-named-llama"])
    save_file({**tensors, **{name: torch.zeros(2, 2) for name in names}}, path / "model.safetensors")
    target = write_target(tmp_path / "target")
    for read in (
        lambda: algorithm_of(path, target),
        lambda: load_draft_config(path, "eagle3", ModelConfig.load(target)),
    ):
        with pytest.raises(ModelError, match=f"this is .*{form}.*it is not supported. Use"):
            read()
