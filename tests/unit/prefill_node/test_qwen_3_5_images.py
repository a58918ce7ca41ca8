"""Qwen3.5 with images, compared with transformers: rows of the tower, logits of prompts, positions, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.qwen_vl_config import QwenVision
from common.checkpoint.rope_config import RopeConfig
from common.engine.layers.placement import Placement
from common.engine.models.learned_tower import corners_of
from common.engine.models.qwen_vl import load_qwen
from common.errors import ModelError
from common.speculation.directory import load_draft_config
from prefill_node.pixel_reader import load_pixel_reader
from tests.fakes.qwen_3_5 import TOWER, build
from tests.fakes.qwen_vl import as_png, picture, processed, save
from tests.unit.prefill_node.test_qwen_vl import MANY, ONE, TEXT, Part, Rig

CPU = Placement(torch.float32, torch.device("cpu"))
TWO: tuple[Part, ...] = (5, 88, (9, 9), 89, 60, 88, (33, 47), 89, 61)
LONG: tuple[Part, ...] = (*range(3, 58), 88, (40, 24), 89, 30)  # token 64 is of the image


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp("qwen35"))


@pytest.mark.parametrize("chunk", [64, 512])
def test_logits_of_text_and_of_one_two_and_three_images(saved: tuple[Any, Path], chunk: int) -> None:
    """All share the same forwards; the longest prompt is cut inside an image."""
    rig = Rig(*saved)
    prompts = [rig.prompt(parts) for parts in (TEXT, ONE, TWO, MANY, LONG)]
    rig.check(prompts, rig.logits(prompts, chunk))


@torch.inference_mode()
def test_rows_of_images_of_different_sizes_are_those_of_transformers(saved: tuple[Any, Path]) -> None:
    model, path = saved
    pictures = [picture(*size) for size in [(40, 24), (9, 9), (33, 47), (100, 20), (16, 16)]]
    wanted, grids = processed(pictures)
    theirs = model.model.get_image_features(wanted, grids).pooler_output
    config = ModelConfig.load(path)
    assert isinstance(config.vision, QwenVision)
    read = load_pixel_reader(path, config.vision, 1_000_000)
    part, images = load_qwen(path, config, CPU), [read(as_png(each)) for each in pictures]
    for image, rows, expected in zip(images, part(images), theirs, strict=True):
        torch.testing.assert_close(rows.flatten(0, 1), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(part([image])[0], rows, atol=1e-5, rtol=1e-4)
    for batch in part.examples():
        assert [rows.shape[:2] for rows in part(batch)] == [(image.rows, image.columns) for image in batch]


def test_the_axes_of_the_published_model_take_turns() -> None:
    axes = RopeConfig(sections=(11, 11, 10), interleaved=True).axis_of_frequencies()
    assert [index for index, axis in enumerate(axes) if axis == 1] == list(range(1, 33, 3))
    assert [index for index, axis in enumerate(axes) if axis == 2] == list(range(2, 30, 3))
    assert len(axes) == 32
    assert RopeConfig(sections=(2, 1, 1)).axis_of_frequencies() == (0, 0, 1, 2)
    assert RopeConfig().axis_of_frequencies() == ()


def test_positions_of_an_image_of_one_patch_and_of_the_learned_size() -> None:
    places = np.array([[0, 0], [0, 0], [0, 1], [1, 0], [1, 1]])
    corners, shares = corners_of(places, [(1, 1), (2, 2)], side=2)
    weights = np.zeros((5, 4))
    for patch in range(5):
        np.add.at(weights[patch], corners[:, patch], shares[:, patch])
    assert weights.argmax(1).tolist() == [0, 0, 1, 2, 3]
    assert (weights.max(1) == 1).all()


def test_text_only_without_a_processor_or_a_vision_part(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = saved
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.load(tmp_path).vision is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    del raw["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.load(tmp_path).vision is None


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        (
            "vision_config",
            {"deepstack_visual_indexes": [1]},
            "deepstack_visual_indexes .* only an empty list",
        ),
        (
            "vision_config",
            {"hidden_act": "silu"},
            "hidden_act 'silu' is not supported, only gelu_pytorch_tanh",
        ),
        ("vision_config", {"num_position_embeddings": 26}, "26 is not the square of a side"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' .* only axial"),
        ("vision_config", {"patch_size": 8}, "patch_size 4 differs from that of the tower, 8"),
        (
            "vision_config",
            {"out_hidden_size": 64},
            "out_hidden_size 64 is not the language model's hidden_size 48",
        ),
        ("text_config", {"rope_parameters": {"rope_type": "default"}}, "need mrope_section"),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [2, 1, 1], "mrope_interleaved": False}},
            "mrope_interleaved false is not supported: this family interleaves its axes",
        ),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [2, 2, 1], "partial_rotary_factor": 0.5}},
            r"mrope_section \[2, 2, 1\] are 5 frequencies",
        ),
    ],
)
def test_configs_that_are_refused(
    part: str, changes: dict[str, Any], said: str, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, path = saved
    raw = json.loads((path / "config.json").read_text())
    raw[part] = {**raw[part], **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "preprocessor_config.json").write_text((path / "preprocessor_config.json").read_text())
    with pytest.raises(ModelError, match=said):
        ModelConfig.load(tmp_path)


def test_the_module_of_the_same_file_has_the_axes_of_the_target(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, path = saved
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((path / name).read_text())
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(48, 96)}, tmp_path / "model.safetensors")
    target = ModelConfig.load(tmp_path)
    assert target.rope.sections == (2, 1, 1)
    draft = load_draft_config(tmp_path, "mtp", target)
    assert draft.model.rope == target.rope
    text = replace(target, rope=replace(target.rope, sections=(), interleaved=False))
    assert load_draft_config(tmp_path, "mtp", text).model.rope == text.rope


def head_over(target: ModelConfig, path: Path, **changes: Any) -> ModelConfig:
    """Return the config of an EAGLE-3 head as it is read for this target."""
    path.mkdir()
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **changes,
    }
    (path / "config.json").write_text(json.dumps(raw))
    save_file({"fc.weight": torch.zeros(1)}, path / "model.safetensors")
    return load_draft_config(path, "eagle3", target).model


def test_a_head_reads_the_temporal_axis_or_has_the_axes_of_the_target(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    target = ModelConfig.load(saved[1])
    plain = head_over(target, tmp_path / "plain").rope
    assert plain.axis_of_frequencies() == (0,) * 6
    assert head_over(replace(target, rope=RopeConfig()), tmp_path / "text").rope.sections == ()
    axes = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    same = head_over(target, tmp_path / "same", head_dim=8, rope_scaling=axes).rope
    assert same.axis_of_frequencies() == target.rope.axis_of_frequencies() == (0, 1, 2, 0)
    runs = {**axes, "mrope_interleaved": False}
    with pytest.raises(ModelError, match="mrope_interleaved is False, the target has True"):
        head_over(target, tmp_path / "runs", head_dim=8, rope_scaling=runs)
    other = {**axes, "mrope_section": [1, 1, 2]}
    with pytest.raises(ModelError, match=r"mrope_section is \[1, 1, 2\], the target has \[2, 1, 1\]"):
        head_over(target, tmp_path / "other", head_dim=8, rope_scaling=other)


def test_published_sizes(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """A config with few keys has transformers' defaults."""
    _, path = saved
    raw = json.loads((path / "config.json").read_text())
    raw["vision_config"] = {"out_hidden_size": TOWER["out_hidden_size"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "image_mean": [0.5] * 3,
    }
    limits = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**processor, **limits}))
    vision = ModelConfig.load(tmp_path).vision
    assert isinstance(vision, QwenVision)
    assert (vision.patch_size, vision.min_pixels, vision.max_pixels) == (16, 65_536, 16_777_216)
    tower = json.loads(vision.tower_options)
    assert (tower["depth"], tower["hidden_size"], tower["num_position_embeddings"]) == (27, 1152, 2304)
