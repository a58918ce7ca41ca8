"""A checkpoint of the toy family with random weights, and the tokenizer of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.placement import Placement
from common.engine.models.model_registry import build_model
from tests.fakes.toy_state.record import ARCHITECTURE

PLACEMENT = Placement(torch.float32, torch.device("cpu"))
# The token ids that generated texts consist of: so few that texts repeat, and n-gram drafts are found.
LIKELY = slice(100, 112)
RAW: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


def write_checkpoint(source: Path, path: Path, mixers: tuple[str, ...]) -> dict[str, Tensor]:
    """Write a model directory with one layer for each of `mixers`, and return its weights.

    `source` is the directory of a model whose tokenizer it takes. The family's rows have to be in the tables.
    """
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    theirs = json.loads((source / "config.json").read_text())
    kept = {key: theirs[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in theirs}
    raw = {**RAW, **kept, "num_hidden_layers": len(mixers), "mixers": list(mixers)}
    (path / "config.json").write_text(json.dumps(raw))
    model = build_model(ModelConfig.parse(raw, path), PLACEMENT)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for piece in model.pieces():
        values = torch.randn(piece.whole, generator=generator) * 0.3
        tensors[piece.name] = values + 1.0 if "norm" in piece.name else values
    unlikely = torch.ones(kept["vocab_size"], 1)
    unlikely[LIKELY] = 10.0
    tensors["lm_head.weight"] *= unlikely / 10.0
    save_file(tensors, path / "model.safetensors")
    return tensors
