"""Qwen2.5-VL against transformers: sizes and pixels, rows of the tower, file layouts, what start-up refuses."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.qwen_vl_config import MAX_RATIO, QwenVision
from common.engine.attention.segments import attend_within, segments_of
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.qwen_vl import PatchOrder, QwenPart, load_qwen
from common.engine.models.vision_part import Pixels
from common.errors import InvalidRequest, ModelError
from common.speculation.directory import load_draft_config
from prefill_node.pixel_reader import load_pixel_reader
from tests.fakes.qwen_vl import (
    IMAGE,
    MERGE,
    PATCH,
    PROCESSOR,
    WINDOW,
    as_png,
    build,
    flatten,
    picture,
    processed,
    rename,
    save,
)

CPU = Placement(torch.float32, torch.device("cpu"))
SIZES = [(40, 24), (9, 9), (33, 47), (100, 20), (16, 16), (48, 40)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("qwen"))


def vision_of(path: Path) -> QwenVision:
    vision = ModelConfig.load(path).vision
    assert isinstance(vision, QwenVision)
    return vision


def pixels(path: Path, pictures: list[Image.Image]) -> list[Pixels]:
    read = load_pixel_reader(path, vision_of(path), 1_000_000)
    return [read(as_png(each)) for each in pictures]


@given(
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.sampled_from([(3136, 12_845_056), (784, 1_003_520), (56 * 56, 60_000)]),
)
def test_sizes_are_those_of_transformers(width: int, height: int, limits: tuple[int, int]) -> None:
    vision = QwenVision("", "{}", 0, 1, 14, 2, 2, *limits, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    if max(width, height) > MAX_RATIO * min(width, height):
        with pytest.raises(InvalidRequest, match="200 times"):
            vision.grid(width, height)
        return
    down, across = smart_resize(height, width, 28, *limits)
    assert vision.size(width, height) == (across, down)
    assert vision.grid(width, height) == (down // 28, across // 28)


def test_patches_are_those_of_transformers(path: Path) -> None:
    """Images are resized, normalized and cut as by transformers' PIL processor, to the last bits of float32."""
    pictures = [picture(*size) for size in SIZES]
    found, (wanted, grids) = pixels(path, pictures), processed(pictures)
    assert [[2 * each.rows, 2 * each.columns] for each in found] == grids[:, 1:].tolist()
    part = QwenPart(vision_of(path), 48, CPU)
    raw = torch.cat([each.values.flatten() for each in found])
    torch.testing.assert_close(part.patches(raw, found), wanted, atol=2e-6, rtol=1e-6)


@torch.inference_mode()
def test_rows_of_images_of_different_sizes_are_those_of_transformers(model: Any, path: Path) -> None:
    """Windows are full, cut and single; several images run in one forward, and each by itself."""
    pictures = [picture(*size) for size in SIZES]
    wanted, grids = processed(pictures)
    theirs = model.model.get_image_features(wanted, grids).pooler_output
    part, images = load_qwen(path, ModelConfig.load(path), CPU), pixels(path, pictures)
    together = part(images)
    for image, rows, expected in zip(images, together, theirs, strict=True):
        assert rows.shape == (image.rows, image.columns, 48)
        torch.testing.assert_close(rows.flatten(0, 1), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(part([image])[0], rows, atol=1e-5, rtol=1e-4)


def test_what_runs_before_serving_has_windows_that_are_full_and_cut(path: Path) -> None:
    part = load_qwen(path, ModelConfig.load(path), CPU)
    for batch in part.examples():
        order = PatchOrder.of(
            [(image.rows, image.columns) for image in batch], MERGE, WINDOW // PATCH // MERGE
        )
        assert order.windows.tolist() == [16, 8]
        for image, rows in zip(batch, part(batch), strict=True):
            assert rows.shape == (image.rows, image.columns, 48)
            assert image.tokens <= 6, "they have to be small, because a node runs them at every start"


class Operations(TorchDispatchMode):
    """Names of calls that compute or copy: one launch each on a GPU, except gated_linear, which has two."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor) or out.untyped_storage()._cdata not in given:
            views = isinstance(out, (list, tuple)) and all(
                each.untyped_storage()._cdata in given for each in out if isinstance(each, torch.Tensor)
            )
            if not views:
                self.names.append(func.name().partition("::")[2])
        return out


def operations(depth: int, whole: list[int], path: Path) -> list[str]:
    """Return the operations of a tower over one image whose windows are all full."""
    vision = vision_of(path)
    options = json.loads(vision.tower_options) | {"depth": depth, "fullatt_block_indexes": whole}
    part = QwenPart(replace(vision, tower_options=json.dumps(options)), 48, CPU)
    for parameter in part.parameters():
        parameter.zero_()
    image = Pixels(torch.zeros(32, 48, 3, dtype=torch.uint8), 4, 6)
    with Operations() as counted:
        part([image])
    return counted.names


def test_the_tower_has_few_launches(path: Path) -> None:
    """Blocks once had 45 launches each on a GPU, which took the host 7 times as long as the arithmetic."""
    around = operations(1, [], path)
    block = Counter(operations(2, [], path)) - Counter(around)
    assert block == {
        "add_rms_norm": 2,
        "linear": 3,
        "gated_linear": 1,
        "rotary_qk": 1,
        "scaled_dot_product_attention": 1,
    }
    assert Counter(operations(2, [1], path)) - Counter(around) == block
    assert len(around) <= 19, around


@pytest.mark.parametrize(("lengths", "products"), [((4, 4, 2, 4), 3), ((5,), 1), ((1, 1, 1), 1)])
def test_rows_attend_to_their_run(lengths: tuple[int, ...], products: int) -> None:
    query, key, value = torch.randn(3, sum(lengths), 2, 8)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = attend_within(query, key, value, segments_of(lengths, starts))
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", query, key) / 8**0.5
    scores.masked_fill_(owner[:, None] != owner, -torch.inf)
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    with torch.inference_mode(), Operations() as counted:
        attend_within(query, key, value, segments_of(lengths, starts))
    assert counted.names.count("scaled_dot_product_attention") == products


@pytest.mark.parametrize("published", [True, False])
@torch.inference_mode()
def test_both_layouts_of_files_are_read_alike(published: bool, model: Any, tmp_path: Path) -> None:
    save(model, tmp_path)
    nested = ModelConfig.load(tmp_path)
    rename(tmp_path, published)
    if published:
        flatten(tmp_path)
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["vision_config"] = {**raw["vision_config"], "model_type": "qwen2_5_vl", "in_chans": 3}
        (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.load(tmp_path) == nested
    assert nested.rope.sections == (2, 3, 3)
    assert nested.architecture == "Qwen2ForCausalLM"
    loaded, config = load_model(tmp_path, "float32")
    assert torch.equal(loaded.embed_tokens.weight, model.get_input_embeddings().weight)
    assert torch.equal(loaded.lm_head.dense(), model.lm_head.weight)
    (image,) = pixels(tmp_path, [picture(30, 20)])
    patches, grids = processed([picture(30, 20)])
    theirs = model.model.get_image_features(patches, grids).pooler_output[0]
    torch.testing.assert_close(
        load_qwen(tmp_path, config, CPU)([image])[0].flatten(0, 1), theirs, atol=1e-5, rtol=1e-4
    )


def test_a_tied_head_and_a_processor_file_of_transformers_5(tmp_path: Path) -> None:
    tied = save(build(tie=True), tmp_path)
    (tied / "preprocessor_config.json").unlink()
    size = {"shortest_edge": PROCESSOR["min_pixels"], "longest_edge": PROCESSOR["max_pixels"]}
    own = {key: value for key, value in PROCESSOR.items() if not key.endswith("_pixels")}
    (tied / "processor_config.json").write_text(json.dumps({"image_processor": {**own, "size": size}}))
    loaded, config = load_model(tied, "float32")
    assert config.tie_word_embeddings
    assert loaded.lm_head.dense() is loaded.embed_tokens.weight
    vision = vision_of(tied)
    assert (vision.min_pixels, vision.max_pixels) == (256, 1920)
    assert model_fingerprint(tied) != ""


def test_a_file_as_published(tmp_path: Path) -> None:
    """The config.json of Qwen2.5-VL-7B-Instruct is read."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    }
    processor = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = ModelConfig.load(tmp_path)
    assert (found.head_dim, found.rope.kind, found.rope.theta) == (128, "default", 1e6)
    assert found.rope.sections == (16, 24, 24)
    assert found.sliding_windows == (None,) * 28
    assert found.qkv_bias
    assert found.vision is not None
    assert found.vision.grid(1024, 768) == (27, 37)
    assert found.vision.grid(4000, 4000) == (128, 128), "16,384 tokens at most"


def edit(path: Path, file: str, **changes: Any) -> None:
    raw = json.loads((path / file).read_text()) | changes
    (path / file).write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def test_what_is_not_supported_is_refused_by_name(model: Any, tmp_path: Path) -> None:
    save(model, tmp_path)
    config, processor = (
        (tmp_path / name).read_text() for name in ("config.json", "preprocessor_config.json")
    )
    raw = json.loads(config)
    tower, text = raw["vision_config"], raw["text_config"]
    rope = text["rope_parameters"]

    def refused(file: str, said: str, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "preprocessor_config.json").write_text(processor)
        edit(tmp_path, file, **changes)
        with pytest.raises(ModelError, match=said):
            ModelConfig.load(tmp_path)

    refused(
        "config.json",
        "frequencies, a head_dim of 16 has 8",
        text_config=text | {"rope_parameters": rope | {"mrope_section": [2, 3, 2]}},
    )
    refused(
        "config.json",
        "3 positive integers",
        text_config=text | {"rope_parameters": rope | {"mrope_section": [8]}},
    )
    refused(
        "config.json",
        "mrope_interleaved",
        text_config=text | {"rope_parameters": rope | {"mrope_interleaved": True}},
    )
    refused(
        "config.json", "need mrope_section", text_config=text | {"rope_parameters": {"rope_type": "default"}}
    )
    refused("config.json", "out_hidden_size 64", vision_config=tower | {"out_hidden_size": 64})
    refused(
        "config.json",
        "spatial_merge_size 2 differs from that of the tower",
        vision_config=tower | {"spatial_merge_size": 4},
    )
    refused("config.json", "images have 3", vision_config=tower | {"in_channels": 4})
    refused("config.json", "image_token_id must be a token id", image_token_id=...)
    refused("preprocessor_config.json", "do_resize False is not supported", do_resize=False)
    refused(
        "preprocessor_config.json",
        "'Qwen3VLImageProcessor' is not supported",
        image_processor_type="Qwen3VLImageProcessor",
    )
    refused("preprocessor_config.json", "min_pixels must be a positive integer", min_pixels=-1)
    refused("preprocessor_config.json", "images of 5000 to 1920 pixels", min_pixels=5000)
    refused("preprocessor_config.json", "at most 65536 tokens", max_pixels=1 << 40)
    refused("preprocessor_config.json", "image_std must be 3 positive numbers", image_std=[1, 2])
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="preprocessor_config.json"):
        ModelConfig.load(tmp_path)
    for name in ("Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"):
        edit(tmp_path, "config.json", architectures=[name])
        with pytest.raises(ModelError, match=f"{name} is not supported"):
            ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [{"type": "mrope", "mrope_section": [2, 2, 2]}, {"rope_type": "default", "mrope_section": [2, 2, 2]}],
)
def test_sections_of_a_text_only_model_are_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    text = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    rest = {"max_position_embeddings": 64, "vocab_size": 9, "intermediate_size": 8, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**text, **rest, "rope_scaling": rope}))
    with pytest.raises(ModelError, match="mrope_section.* only for models that read images"):
        ModelConfig.load(tmp_path)


def test_a_draft_has_to_read_the_positions_of_its_target(path: Path, tmp_path: Path) -> None:
    target = ModelConfig.load(path)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "dtype": "float32",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    # A head is recognised by its tensors.
    save_file({"fc.weight": torch.zeros(48, 144)}, tmp_path / "model.safetensors")
    assert load_draft_config(tmp_path, "eagle3", target).model.rope.sections == (2, 3, 3)
    for changes, said in (
        ({"rope_scaling": None}, "mrope_section is not set, the target has"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}, r"mrope_section is \[4, 2, 2\]"),
    ):
        file.write_text(json.dumps(raw | changes))
        with pytest.raises(ModelError, match=said):
            load_draft_config(tmp_path, "eagle3", target)


def test_placeholders_are_tokens_of_the_vocabulary(path: Path) -> None:
    assert vision_of(path).image_token_id == IMAGE < ModelConfig.load(path).vocab_size
