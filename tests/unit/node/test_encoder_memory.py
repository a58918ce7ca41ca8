"""The memory plan of a vision part's forward, compared with the tensors that are alive during one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import CLIPVisionConfig, Qwen2_5_VLVisionConfig, SiglipVisionConfig

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.qwen_vl_config import CLIP_MEAN, CLIP_STD, MAX_RATIO, QwenVision
from common.engine import encoder_sizes
from common.engine.layers.placement import Placement
from common.engine.models.llava import LlavaPart
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import Pixels
from common.errors import ModelError
from common.node import encoder_memory
from common.node.encoder_memory import DEFAULTS, encoder_bytes
from tests.fakes.alive import Alive

HIDDEN = 48
CPU = torch.device("cpu")


def clip(tower: str = "clip_vision_model", **options: Any) -> LlavaVision:
    raw = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    }
    layers, drop = (-2,), tower == "clip_vision_model"
    return LlavaVision(
        "",
        tower,
        json.dumps(raw | options),
        0,
        64,
        32,
        layers,
        drop,
        projector_act="gelu",
        projector_bias=True,
    )


def qwen(max_pixels: int = 64 * 64, **options: Any) -> QwenVision:
    raw = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_heads": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    tower = json.dumps(raw | options)
    return QwenVision("", tower, 0, 1, 4, 2, 2, 64, max_pixels, 1 / 255, CLIP_MEAN, CLIP_STD)


LEARNED: dict[str, Any] = {
    "num_position_embeddings": 25,
    "learned": True,
    "rope_parameters": {"rope_theta": 10_000.0},
}


def most_alive(part: LlavaPart | QwenPart, batches: Sequence[Sequence[Pixels]]) -> int:
    most = 0
    for batch in batches:
        with Alive((*part.parameters(), *part.buffers())) as alive:
            rows = [each.clone() for each in part(batch)]
        assert len(rows) == len(batch)
        most = max(most, alive.most)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tower", [clip(), clip(hidden_act="quick_gelu", intermediate_size=512), clip("siglip_vision_model")]
)
def test_llava_takes_no_more_and_not_much_less(
    tower: LlavaVision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_sizes, "ENCODER_TOKENS", 64 * 2)
    part = LlavaPart(tower, HIDDEN, Placement(dtype, CPU)).eval()
    most = most_alive(part, [[Pixels(torch.rand(3, 32, 32), 1, 64)] * 2])
    bound = encoder_bytes(tower, HIDDEN, dtype)
    assert most <= bound < 2 * most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tower", "grids"),
    [
        (qwen(), [(4, 8), (4, 8)]),
        (qwen(intermediate_size=400), [(8, 8)]),
        (qwen(intermediate_size=16), [(1, 16), (6, 8)]),  # windows cut to a quarter and to a half
        (qwen(**LEARNED), [(4, 8), (4, 8)]),
        (qwen(**LEARNED, intermediate_size=400), [(8, 8)]),
        (qwen(**LEARNED, intermediate_size=16), [(1, 16), (6, 8)]),
    ],
)
def test_qwen_takes_no_more_and_not_much_less(
    tower: QwenVision, grids: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is checked for a full batch with images of at most that size."""
    monkeypatch.setattr(encoder_memory, "ENCODER_TOKENS", 64)
    monkeypatch.setattr(encoder_memory, "largest_image", lambda vision: 0)
    part = QwenPart(tower, HIDDEN, Placement(dtype, CPU)).eval()
    images = [
        Pixels(torch.zeros(8 * rows, 8 * columns, 3, dtype=torch.uint8), rows, columns)
        for rows, columns in grids
    ]
    assert sum(image.tokens for image in images) == 64
    most, bound = most_alive(part, [images]), encoder_bytes(tower, HIDDEN, dtype)
    assert most <= bound < 2.5 * most


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([(16, 200), (4, 4000), (900, 1000)]))
def test_no_image_is_larger_than_the_largest(width: int, height: int, tokens: tuple[int, int]) -> None:
    """The bound holds for all proportions."""
    least, most = (64 * each for each in tokens)
    vision = QwenVision("", "{}", 0, 1, 4, 2, 2, least, most, 1 / 255, CLIP_MEAN, CLIP_STD)
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    rows, columns = vision.grid(width, height)
    assert rows * columns <= encoder_memory.largest_image(vision)


def test_the_published_models() -> None:
    """Qwen2.5-VL-7B in bf16 takes 65,536 patches of about 40 KB."""
    seven = qwen(
        28 * 28 * 16_384,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        window_size=112,
        depth=32,
    )
    large = QwenVision(
        "", seven.tower_options, 0, 1, 14, 2, 2, 3136, seven.max_pixels, 1 / 255, CLIP_MEAN, CLIP_STD
    )
    per_patch = encoder_bytes(large, 3584, torch.bfloat16) / 65_536
    assert 30_000 < per_patch < 60_000
    assert encoder_bytes(large, 3584, torch.float32) < 2 * 65_536 * per_patch


def test_what_a_file_leaves_out_is_transformers_default() -> None:
    classes = {
        "clip_vision_model": CLIPVisionConfig(),
        "siglip_vision_model": SiglipVisionConfig(),
        "qwen2_5_vl": Qwen2_5_VLVisionConfig(),
    }
    for tower, defaults in DEFAULTS.items():
        assert {key: getattr(classes[tower], key) for key in defaults} == defaults
    with pytest.raises(ModelError, match="intermediate_size must be a positive integer"):
        encoder_bytes(clip(intermediate_size="many"), HIDDEN, torch.float32)
