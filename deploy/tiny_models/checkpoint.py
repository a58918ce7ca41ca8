"""Writes the target as a standard Hugging Face directory: config, bf16 weights, tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from deploy.tiny_models import tokenizer as family

MAX_FILE_BYTES = 8_000_000  # the directory is checked into the repository


@dataclass(frozen=True, slots=True)
class Shape:
    """The target's dimensions.

    It has eight narrow layers rather than six wide ones of the same total size, so that the three layers that an
    EAGLE-3 draft reads by default, [2, L/2, L-3], differ.
    """

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 320


SMOKE_SHAPE = Shape(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def config_dict(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Build config.json by hand: transformers 4 and 5 can read it (rope_theta and rope_parameters)."""
    rope_theta = 10_000.0
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        **asdict(shape),
        "max_position_embeddings": family.MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.token_to_id(family.BOS),
        "eos_token_id": tokenizer.token_to_id(family.END),
        "pad_token_id": tokenizer.token_to_id(family.PAD),
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def new_model(config: dict[str, Any], seed: int) -> LlamaForCausalLM:
    """Return a newly initialized fp32 model."""
    torch.manual_seed(seed)
    values = {key: value for key, value in config.items() if key not in ("torch_dtype", "rope_theta")}
    return LlamaForCausalLM(LlamaConfig(**values))  # torch's default dtype, fp32


def round_to_bf16(model: nn.Module) -> None:
    """Round the weights to bf16, as the file stores them, but keep them in fp32, as a CPU node serves them."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16().float())


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json of a model with the tokens of `config`."""
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write tensors to a file. Raises ValueError if it is too large to be checked in."""
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates it readable only by the owner
    if path.stat().st_size >= MAX_FILE_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes; checked-in files must stay below {MAX_FILE_BYTES}"
        )


def save(directory: Path, model: LlamaForCausalLM, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write everything except the model card."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().cpu().bfloat16().contiguous() for name, value in model.state_dict().items()
    }
    write_weights(directory / "model.safetensors", weights)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = json.dumps(generation_config(config), indent=2)
    (directory / "generation_config.json").write_text(generation + "\n")
    family.write(tokenizer, directory)
