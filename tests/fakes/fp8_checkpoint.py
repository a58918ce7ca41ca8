"""Rewrites the tensors of a dense checkpoint in any published form of FP8."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.fp8_weights import BLOCK, CHANNEL, Fp8Scheme, Fp8Weights
from common.checkpoint.weight_formats import stored_weights

HIGHEST, SIZE = 448.0, 128
# What no form of the field quantises.
DENSE = ("embed_tokens", "lm_head", ".gate", "shared_expert_gate")


def quantised_tensors(
    tensors: Mapping[str, Tensor], section: Mapping[str, Any], input_scale: float = 0.05
) -> dict[str, Tensor]:
    """Return the tensors as a checkpoint with this `quantization_config` has them.

    Args:
        input_scale: of every product, where activations are static.
    """
    stored = stored_weights({"quantization_config": section}, "config.json")
    assert isinstance(stored, Fp8Weights)
    found: dict[str, Tensor] = {}
    for name, tensor in _separate_experts(tensors).items():
        product = name.removesuffix(".weight")
        scheme = stored.scheme_of(product)
        if scheme is None or tensor.ndim != 2 or product == name or product.endswith(DENSE):
            found[name] = tensor
            continue
        codes, scales = quantise(tensor.float(), scheme)
        found[name] = codes
        found[f"{product}.{scheme.scale}"] = scales
        if scheme.static:
            found[f"{product}.input_scale"] = torch.tensor(input_scale)
    return found


def _separate_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace stacks of experts by a matrix per expert, as all published files in FP8 have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts") or tensor.ndim != 3:
            found[name] = tensor
            continue
        for index, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, values in parts.items():
                found[f"{stem}.{index}.{part}.weight"] = values.contiguous()
    return found


def quantise(values: Tensor, scheme: Fp8Scheme) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) as files have them."""
    if scheme.weights == BLOCK:
        rows, columns = values.shape
        padded = torch.nn.functional.pad(values, (0, -columns % SIZE, 0, -rows % SIZE))
        tiles = padded.view(padded.shape[0] // SIZE, SIZE, padded.shape[1] // SIZE, SIZE)
        scales = tiles.abs().amax((1, 3)).clamp(min=1e-6) / HIGHEST
        wide = scales.repeat_interleave(SIZE, 0)[:rows].repeat_interleave(SIZE, 1)[:, :columns]
        return (values / wide).to(torch.float8_e4m3fn), scales
    if scheme.weights == CHANNEL:
        scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-6) / HIGHEST
        return (values / scales).to(torch.float8_e4m3fn), scales.bfloat16()
    scale = values.abs().amax().clamp(min=1e-6) / HIGHEST
    return (values / scale).to(torch.float8_e4m3fn), scale


def write_checkpoint(
    source: Path, target: Path, section: Mapping[str, Any], input_scale: float = 0.05
) -> Path:
    """Write the dense model of `source` in the form that `section` describes."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors.update(load_file(file))
    save_file(quantised_tensors(tensors, section, input_scale), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = section
    (target / "config.json").write_text(json.dumps(config))
    return target
