"""Models with gated delta layers over pages and states: their logits equal those of transformers in float32."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.models.model_size import check_model_size
from common.errors import ModelError
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

LENGTHS = (1, 2, 3, 63, 64, 65, 129)
AFTER = 3  # tokens after a prompt
SEQUENCES = [
    torch.randint(families.VOCAB, (n + AFTER,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
]


def check(path: Path, reference: Any, chunk: int | None) -> None:
    actual = Driver(load_model(path)[0], SEQUENCES, 16).run_all(chunk, LENGTHS)
    for ours, ids in zip(actual, SEQUENCES, strict=True):
        theirs = families.reference_logits(reference, ids)
        assert theirs.std() > 0.5  # the logits are not trivial
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5-moe-tied"])
@pytest.mark.parametrize("chunk", [64, None])
def test_prompts_and_decode_steps_around_the_size_of_a_chunk(
    name: str, chunk: int | None, tmp_path: Path
) -> None:
    model = families.build(name)
    check(families.save(model, tmp_path), model, chunk)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_the_language_model_of_a_checkpoint_that_takes_images(moe: bool, tmp_path: Path) -> None:
    """Tensors of the vision part and of MTP modules are not read; some copies have this name without a vision part."""
    name, config = ("Qwen3_5Moe", families.SHARED) if moe else ("Qwen3_5", {})
    text = {**families.BASE, **families.HYBRID, **config}
    sections = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    }
    whole = getattr(transformers, f"{name}Config")(
        text_config=copy.deepcopy({**text, "rope_parameters": sections}),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 48,
        },
    )
    model = families.randomise(getattr(transformers, f"{name}ForConditionalGeneration")(whole).eval())
    families.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(48, 96)}, file)
    assert any(each.startswith("model.visual.") for each in tensors)
    check(tmp_path, model, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not supported, only 4"),
        ({"linear_key_head_dim": 256}, "linear_key_head_dim 256 is more than the 128 that are supported"),
        ({"linear_value_head_dim": 1 << 14}, "linear_value_head_dim 16384 is more than the 128"),
        ({"linear_num_value_heads": 5}, "2 key heads cannot serve 5 value heads evenly"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "layer_types must name",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_types must name"),
        ({"layer_types": [["linear_attention"]] * 3}, "layer_types must name"),
        ({"output_gate_type": "relu"}, "output_gate_type 'relu' is not supported"),
        ({"linear_num_value_heads": 4096, "linear_value_head_dim": 128}, "more than the 262144 of one token"),
        (
            {"full_attention_interval": 0, "layer_types": None},
            "full_attention_interval must be a positive integer",
        ),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**families.BASE, **families.HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ModelError, match=said):
        ModelConfig.load(tmp_path)


def test_every_fourth_layer_attends_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    raw = {**families.BASE, **families.HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    del raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 9}))
    found = [kind.mixer for kind in ModelConfig.load(tmp_path).layer_kinds]
    assert [layer for layer, mixer in enumerate(found) if mixer == "attention"] == [3, 7]
    (tmp_path / "config.json").write_text(json.dumps({**raw, "full_attention_interval": 2}))
    assert [kind.mixer for kind in ModelConfig.load(tmp_path).layer_kinds] == [
        "gated_delta",
        "attention",
        "gated_delta",
    ]


def test_gated_delta_layers_count_in_the_size_of_a_model(tmp_path: Path) -> None:
    """A config whose layers are out of proportion to the weights is refused before memory is allocated."""
    config = ModelConfig.load(families.save(families.build("qwen3.5"), tmp_path))
    check_model_size(tmp_path, config, torch.float32, torch.device("cpu"))
    assert config.gated_delta is not None
    wide = replace(config, gated_delta=replace(config.gated_delta, value_dim=1 << 14))
    with pytest.raises(ModelError, match=r"gated delta layers of 98336 channels .* make a model of at least"):
        check_model_size(tmp_path, wide, torch.float32, torch.device("cpu"))
