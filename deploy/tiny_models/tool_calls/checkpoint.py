"""The config.json of the model and of its drafts, and the model's published directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.tiny_models.checkpoint import write_weights
from deploy.tiny_models.drafts.shapes import draft_config
from deploy.tiny_models.tokenizer import id_of
from deploy.tiny_models.tool_calls import vocabulary
from deploy.tiny_models.tool_calls.chat_form import END, PAD

Config = dict[str, Any]
WEIGHTS = "model.safetensors"
TIED = "lm_head.weight"  # the embedding, which is stored once


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions."""

    hidden_size: int = 160
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192


SMOKE_SHAPE = Shape(hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)


def config_dict(shape: Shape, tokenizer: Tokenizer) -> Config:
    """Return config.json of the model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        **_common(tokenizer.get_vocab_size(), id_of(tokenizer, END), id_of(tokenizer, PAD)),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }


def _common(vocab_size: int, end: int, pad: int) -> Config:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": vocabulary.MAX_POSITIONS,
        "pad_token_id": pad,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _llama(config: Config, **dimensions: int) -> Config:
    """Return the dimensions of a draft in the form of a Llama with the model's tokens and hidden size."""
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "model_type": "llama",
        **{key: config[key] for key in kept},
        **_common(config["vocab_size"], config["eos_token_id"], config["pad_token_id"]),
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **dimensions,
    }


def eagle3_config(config: Config) -> Config:
    """Return config.json of the EAGLE-3 head."""
    made = draft_config("eagle3", _llama(config, intermediate_size=128))
    layers = config["num_hidden_layers"]
    made["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, layers // 2, layers - 1]
    return made


def standalone_config(config: Config) -> Config:
    """Return config.json of the small model that drafts from the text only."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return {**draft_config("standalone", _llama(config)), **small}


def new_model(config: Config, seed: int) -> Qwen3ForCausalLM:
    """Return a newly initialized model in float32."""
    torch.manual_seed(seed)
    left_out = ("architectures", "torch_dtype", "rope_theta")
    return Qwen3ForCausalLM(
        Qwen3Config(**{key: value for key, value in config.items() if key not in left_out})
    )


def save(directory: Path, model: Qwen3ForCausalLM, config: Config, tokenizer: Tokenizer) -> None:
    """Write everything except the model card."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().cpu().bfloat16().contiguous()
        for name, value in model.state_dict().items()
        if name != TIED
    }
    write_weights(directory / WEIGHTS, weights)
    generation = {
        "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    vocabulary.write(tokenizer, directory)


def load(directory: Path) -> Qwen3ForCausalLM:
    """Read a written directory, in float32 and frozen."""
    model = new_model(json.loads((directory / "config.json").read_text()), seed=0)
    tensors = {name: value.float() for name, value in load_file(directory / WEIGHTS).items()}
    model.load_state_dict({**tensors, TIED: tensors["model.embed_tokens.weight"]})
    model.requires_grad_(False)
    model.train(False)
    return model
