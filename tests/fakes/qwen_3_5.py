"""A random tiny Qwen3.5 that takes images, built and saved by transformers, with the processor of `qwen_vl.py`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers

from tests.fakes.qwen_vl import MERGE, OUTER, PATCH
from tests.unit.engine import families

TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": families.BASE["hidden_size"],
    "num_position_embeddings": 25,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    # 4 frequencies: temporal, height, width, temporal
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}


def build(
    experts: bool = False,
    outer: Mapping[str, int] = OUTER,
    text: Mapping[str, Any] = MappingProxyType({}),
    **tower: Any,
) -> Any:
    """Build a model whose parameters are all random, so that each affects the output.

    `outer`: ids of special tokens; `text`, `tower`: values of the nested configs over the defaults.
    """
    name, more = ("Qwen3_5Moe", families.SHARED) if experts else ("Qwen3_5", {})
    values = {**families.BASE, **families.HYBRID, **more, "rope_parameters": ROPE, **text}
    config = getattr(transformers, f"{name}Config")(
        text_config=copy.deepcopy(values), vision_config={**TOWER, **tower}, **outer
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(5)
    families.randomise(model)
    with torch.no_grad():
        for name, parameter in model.model.visual.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model
