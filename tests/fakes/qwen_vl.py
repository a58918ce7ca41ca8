"""A random tiny Qwen2.5-VL, built and saved by transformers, with its image processor."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, VIDEO = 90, 91
PATCH, MERGE, WINDOW = 4, 2, 16  # in pixels, patches, pixels: a token is 8 x 8 pixels, a window 2 x 2 tokens
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "min_pixels": 4 * 64,
    "max_pixels": 30 * 64,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "window_size": WINDOW,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1],
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]},
}
OUTER = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 88,
    "vision_end_token_id": 89,
}


def build(seed: int = 3, tie: bool = False, outer: dict[str, Any] | None = None, **text: Any) -> Any:
    """Build a model whose parameters are all random, so that each affects the output."""
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, **text}, vision_config=TOWER, tie_word_embeddings=tie, **(OUTER | (outer or {}))
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name or "ln_q" in name:
                parameter.add_(1.0)
    return model


def save(model: Any, path: Path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


def flatten(path: Path) -> None:
    """Rewrite config.json to the published form: text fields at the top level, "type": "mrope"."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        **raw,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    file.write_text(json.dumps(flat))


def rename(path: Path, published: bool) -> None:
    """Rename tensors to the names of published checkpoints, or of the state dict of transformers 5."""
    pairs = (("model.language_model.", "model."), ("model.visual.", "visual."))
    renamed = {}
    for name, value in load_file(path / "model.safetensors").items():
        plain = name
        for nested, short in pairs:
            if name.startswith(nested):
                plain = short + name.removeprefix(nested)
        if not published and not plain.startswith("lm_head"):
            plain = (
                f"model.{plain}" if plain.startswith("visual.") else plain.replace("model.", pairs[0][0], 1)
            )
        renamed[plain] = value
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng([width, height, seed])
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def as_png(made: Image.Image) -> bytes:
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


def processed(pictures: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Process pictures with transformers: (patches [N, C], grids [I, 3])."""
    made = Qwen2VLImageProcessorPil(
        **{key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    )(images=list(pictures), return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def inputs_of(
    ids: Sequence[int], pictures: Sequence[Image.Image], placeholder: int = IMAGE
) -> dict[str, torch.Tensor]:
    """Return inputs for a forward or generate of transformers; placeholders are already expanded."""
    tokens = torch.tensor([list(ids)])
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == placeholder).int()}
    if pictures:
        inputs["pixel_values"], inputs["image_grid_thw"] = processed(pictures)
    return inputs


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int], pictures: Sequence[Image.Image]) -> torch.Tensor:
    """Return the logits [T, V] of one forward without a cache."""
    model.model.rope_deltas = None
    logits: torch.Tensor = model(**inputs_of(ids, pictures), use_cache=False).logits[0]
    return logits
