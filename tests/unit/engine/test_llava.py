"""The vision part of LLaVA checkpoints against transformers: towers, name layouts, what start-up refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.model_runner import ModelRunner, load_model
from common.engine.layers.placement import Placement
from common.engine.models.llava import load_llava
from common.engine.models.vision_part import Pixels
from common.errors import ModelError
from common.node.serving_draft import load_serving_draft
from prefill_node.pixel_reader import load_pixel_reader
from tests.fakes.pools import model_pool
from tests.fakes.tiny_model import MAX_LEN
from tests.fakes.vision import one_prompt

CPU = Placement(torch.float32, torch.device("cpu"))
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TEXT: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": CLIPVisionConfig(**TOWER), "vision_feature_layer": -2},
    "clip-two-layers-full": {
        "vision_config": CLIPVisionConfig(**TOWER),
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
    },
    "siglip": {
        "vision_config": SiglipVisionConfig(**TOWER, vision_use_head=False),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}


def save(path: Path, text: Any = None, **options: Any) -> LlavaForConditionalGeneration:
    torch.manual_seed(3)
    config = LlavaConfig(text_config=text or LlamaConfig(**TEXT), image_token_index=95, **options)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return model


def rename(path: Path, change: dict[str, str]) -> None:
    """Rename the checkpoint's tensors: {prefix: new prefix}; the first match applies."""
    weights = load_file(path / "model.safetensors")
    renamed = {}
    for name, value in weights.items():
        old = next((each for each in change if name.startswith(each)), None)
        renamed[name if old is None else change[old] + name.removeprefix(old)] = value
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def ours(path: Path, pixels: torch.Tensor) -> torch.Tensor:
    rows = load_llava(path, ModelConfig.load(path), CPU)([Pixels(each, 1, 1) for each in pixels])
    return torch.cat(rows)


@torch.inference_mode()
def theirs(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(model.model.get_image_features(pixels).pooler_output))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, **CASES[case])
    pixels = torch.randn(3, 3, 16, 16)
    rows, wanted = ours(tmp_path, pixels), theirs(model, pixels)
    assert rows.shape == wanted.shape
    assert (rows - wanted).abs().max() < 1e-5
    vision = ModelConfig.load(tmp_path).vision
    assert vision is not None
    assert (1, rows.shape[1]) == vision.grid(640, 480)
    assert vision.image_token_id == 95 >= ModelConfig.load(tmp_path).vocab_size, (
        "placeholder ids may lie outside the vocabulary"
    )


def test_one_image_runs_before_serving(tmp_path: Path) -> None:
    save(tmp_path, **CASES["clip"])
    part = load_llava(tmp_path, ModelConfig.load(tmp_path), CPU)
    ((image,),) = part.examples()
    assert image.tokens == 16
    assert part([image])[0].shape == (1, 16, 32)


LAYOUTS = {
    "published-4": {"vision_tower.": "vision_tower.vision_model."},
    "state-dict-5": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_names_is_read(layout: str, tmp_path: Path) -> None:
    model = save(tmp_path, **CASES["clip"])
    rename(tmp_path, LAYOUTS[layout])
    pixels = torch.randn(2, 3, 16, 16)
    assert (ours(tmp_path, pixels) - theirs(model, pixels)).abs().max() < 1e-5
    loaded, _ = load_model(tmp_path, "float32")
    assert torch.equal(loaded.lm_head.dense(), model.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.inference_mode()
def test_the_language_model_over_merged_rows_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    text = LlamaConfig(**TEXT) if family == "llama" else Qwen2Config(**TEXT)
    model = save(tmp_path, text, **CASES["clip"])
    ids = torch.tensor([[4, 8, *[95] * 16, 7, 3]])
    pixels = torch.randn(1, 3, 16, 16)
    # An id outside the vocabulary has no embedding, so transformers is given embeddings too.
    embeds = model.get_input_embeddings()(ids.clamp(max=89))
    embeds[0, 2:18] = theirs(model, pixels)[0]
    wanted = model(inputs_embeds=embeds).logits[0]

    loaded, config = load_model(tmp_path, "float32")
    assert config.architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    merged = loaded.embed(ids[0].clamp(max=89))
    merged[2:18] = ours(tmp_path, pixels)[0]
    pool = model_pool(config, MAX_LEN, 2, CPU)
    runner = ModelRunner(loaded, pool, PagedAttention(pool, config.sliding_windows))
    assert (runner(one_prompt(20), merged).logits[0] - wanted[-1]).abs().max() < 1e-3


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, **CASES["clip"])
    raw = json.loads((tmp_path / "config.json").read_text())
    tower, text = raw["vision_config"], raw["text_config"]
    for changes, said in (
        ({"vision_config": tower | {"model_type": "pixtral"}}, "vision tower 'pixtral' is not supported"),
        ({"text_config": text | {"model_type": "gpt2", "architectures": None}}, "'gpt2' is not supported"),
        ({"vision_feature_select_strategy": "cls"}, "default or full"),
        ({"vision_feature_layer": 9}, "is not a layer of a tower with 3"),
        ({"image_token_index": None}, "image_token_index must be a token id"),
        ({"vision_config": tower | {"image_size": 4096, "patch_size": 1}}, "tokens is not supported"),
        ({"vision_config": [1]}, "vision_config must be an object"),
    ):
        edit(tmp_path, **(raw | changes))
        with pytest.raises(ModelError, match=said):
            ModelConfig.load(tmp_path)
    edit(tmp_path, **(raw | {"projector_hidden_act": "nonsense"}))
    with pytest.raises(ModelError, match="nonsense"):
        load_llava(tmp_path, ModelConfig.load(tmp_path), CPU)
    edit(tmp_path, **(raw | {"vision_config": tower | {"hidden_size": 64, "num_attention_heads": 2}}))
    with pytest.raises(ModelError, match="wrongly shaped"):
        load_llava(tmp_path, ModelConfig.load(tmp_path), CPU)


def test_an_old_file_leaves_out_what_is_usual(tmp_path: Path) -> None:
    """Like the file of llava-1.5-7b, whose text_config names its model and little else."""
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "text_config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32064},
        "torch_dtype": "float16",
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ModelConfig.load(tmp_path)
    assert (found.hidden_size, found.num_layers, found.dtype) == (4096, 32, "float16")
    assert found.vision is not None
    assert found.vision.grid(640, 480) == (1, 576)


def test_a_draft_that_reads_only_ids_is_refused_at_start_up(tmp_path: Path) -> None:
    """It raises ValueError with the remedy, before anything is loaded."""
    save(tmp_path, **CASES["clip"])
    target, config = load_model(tmp_path, "float32")
    draft = DraftConfig("standalone", config, 0, AuxLayers(), None, False)
    with pytest.raises(
        ValueError, match="cannot take the embeddings of the images .* set speculation.algorithm to"
    ) as refused:
        load_serving_draft(tmp_path, draft, 3, 1, target)
    assert isinstance(refused.value, ModelError), "start-up reports it like other errors of checkpoints"


def test_the_image_processor_has_to_fit_the_tower(tmp_path: Path) -> None:
    save(tmp_path, **CASES["clip"])
    vision = ModelConfig.load(tmp_path).vision
    assert vision is not None
    with pytest.raises(ModelError, match="cannot load its image processor"):
        load_pixel_reader(tmp_path, vision, 10_000)
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    }
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(processor))
    assert load_pixel_reader(tmp_path, vision, 10_000) is not None
    file.write_text(json.dumps(processor | {"crop_size": {"height": 8, "width": 16}}))
    with pytest.raises(ModelError, match=r"returns \[3, 8, 16\]"):
        load_pixel_reader(tmp_path, vision, 10_000)
