"""Reads and writes drafts: directories with config.json and bf16 weights under their published names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from deploy.tiny_models.checkpoint import new_model
from deploy.tiny_models.drafts.features import TARGET
from deploy.tiny_models.drafts.heads import Eagle3Head, EagleHead, Head, MtpHead, StandaloneHead
from deploy.tiny_models.drafts.shapes import Kind, kind_of, mtp_prefix

MAX_FILE_BYTES = 4_000_000
TOKENIZER_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def new_head(config: dict[str, Any], seed: int) -> Head:
    """Create a newly initialized draft in fp32."""
    kind = kind_of(config)
    if kind == "standalone":
        return StandaloneHead(new_model(config, seed))
    torch.manual_seed(seed)
    heads: dict[Kind, type[Eagle3Head | EagleHead | MtpHead]]
    heads = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead}
    return heads[kind](config)


def published(head: Head, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return a draft's tensors under the names of published checkpoints; floating-point tensors become bf16."""
    tensors = {}
    for name, value in head.state_dict().items():
        kept = value.detach().cpu()
        kept = kept.bfloat16() if kept.is_floating_point() else kept
        tensors[_published_name(name, config)] = kept.contiguous()
    return tensors


def _published_name(name: str, config: dict[str, Any]) -> str:
    kind = kind_of(config)
    if kind == "mtp":
        _, module, rest = name.split(".", 2)  # layers.0.enorm.weight
        return mtp_prefix(config, int(module)) + rest
    return name.removeprefix("model.") if kind == "standalone" else name


def save(directory: Path, head: Head, config: dict[str, Any], target: Path = TARGET) -> None:
    """Write everything except the model card. A STANDALONE draft is a complete model with a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    save_file(published(head, config), path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates it readable only by the owner
    if path.stat().st_size >= MAX_FILE_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; drafts must stay below {MAX_FILE_BYTES}")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if kind_of(config) == "standalone":
        for name in TOKENIZER_FILES:
            shutil.copyfile(target / name, directory / name)


def load_config(directory: Path) -> dict[str, Any]:
    """Read the draft's config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def load_head(directory: Path) -> tuple[Kind, Head]:
    """Load a checked-in draft, its bf16 weights in fp32."""
    config = load_config(directory)
    kind = kind_of(config)
    head: Head
    if kind == "standalone":
        head = StandaloneHead(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32))
    else:
        head = new_head(config, seed=0)
        tensors = load_file(directory / "model.safetensors")
        state = {name: tensors.pop(_published_name(name, config)) for name in head.state_dict()}
        if tensors:
            raise ValueError(f"{directory}: unexpected tensors {sorted(tensors)}")
        head.load_state_dict(state)
    head.requires_grad_(False)
    return kind, head.train(False)
