"""The config.json of each model with experts, as checkpoints of its kind are published, and the model for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deploy.tiny_models import tokenizer as vocabulary
from deploy.tiny_models.drafts.shapes import draft_config
from deploy.tiny_models.language_model import LanguageModel

EAGER = "eager"  # implementation of the experts: the others need bf16 weights

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions that both models have."""

    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 72

    def values(self) -> Config:
        """Return them under their keys in config.json."""
        return {key: getattr(self, key) for key in self.__slots__}


SMOKE_SHAPE = Shape(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32
)


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model with experts."""

    directory: str
    architecture: str  # in words, for the model card
    config: Callable[[Shape, Tokenizer], Config]  # the content of config.json
    text: Callable[[Config], Config]  # the part of it that describes the language model
    new_model: Callable[[Config], LanguageModel]  # an initialised model of that part
    prefix: str  # before the layers in the checkpoint
    # suffixes of tensors that stay float32 in the checkpoint; the others are bf16
    wide: tuple[str, ...] = ()
    has_mtp: bool = False


def text_of_hybrid(config: Config) -> Config:
    """Return the section of the language model."""
    section: Config = config["text_config"]
    return section


def hybrid_config(shape: Shape, tokenizer: Tokenizer) -> Config:
    """Return the config.json of a text-only Qwen3.5 mixture: every third layer has attention, the others a state."""
    text = {
        **_common(shape, tokenizer),
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "full_attention_interval": 3,
        "layer_types": [
            "full_attention" if layer % 3 == 2 else "linear_attention"
            for layer in range(shape.num_hidden_layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": _sections(shape.head_dim // 8),
        },
        "shared_expert_intermediate_size": shape.moe_intermediate_size,
    }
    ids = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **ids,
    }


def _sections(frequencies: int) -> list[int]:
    """Divide the rotated frequencies of a head between three axes, as evenly as published checkpoints do."""
    third = frequencies // 3
    return [frequencies - 2 * third, third, third]


def new_hybrid(text: Config) -> Qwen3_5MoeForCausalLM:
    """Return an initialised model."""
    config = Qwen3_5MoeTextConfig(**_without_dtype(text))
    config._experts_implementation = EAGER
    return Qwen3_5MoeForCausalLM(config)


def moe_config(shape: Shape, tokenizer: Tokenizer) -> Config:
    """Return the config.json of a Qwen3 mixture: attention in every layer, no shared expert."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_common(shape, tokenizer),
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "intermediate_size": 2 * shape.moe_intermediate_size,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "torch_dtype": "bfloat16",
    }


def eagle3_config(text: Config) -> Config:
    """Return the config.json of an EAGLE-3 head for a model with this language part."""
    base = {
        **{key: text[key] for key in Shape.__slots__ if not key.startswith(("moe", "num_experts"))},
        **{key: text[key] for key in ("vocab_size", "rms_norm_eps", "max_position_embeddings")},
        "model_type": "llama",
        "hidden_act": "silu",
        "intermediate_size": 2 * text["hidden_size"],
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    layers = text["num_hidden_layers"]
    config = draft_config("eagle3", base)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, layers // 2, layers - 1]
    return config


def new_moe(config: Config) -> Qwen3MoeForCausalLM:
    """Return an initialised model."""
    made = Qwen3MoeConfig(**_without_dtype(config))
    made._experts_implementation = EAGER
    return Qwen3MoeForCausalLM(made)


def _common(shape: Shape, tokenizer: Tokenizer) -> Config:
    return {
        **shape.values(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(vocabulary.BOS),
        "eos_token_id": tokenizer.token_to_id(vocabulary.END),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": vocabulary.MAX_POSITIONS,
        "pad_token_id": tokenizer.token_to_id(vocabulary.PAD),
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def _without_dtype(config: Config) -> Config:
    return {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "torch_dtype", "rope_theta")
    }


FAMILIES: Mapping[str, Family] = {
    "hybrid": Family(
        "tiny-hybrid",
        "Qwen3.5 mixture of experts (two gated delta layers before each attention layer)",
        hybrid_config,
        text_of_hybrid,
        new_hybrid,
        "model.language_model.",
        wide=(".A_log", ".linear_attn.norm.weight"),
        has_mtp=True,
    ),
    "moe": Family(
        "tiny-moe", "Qwen3 mixture of experts", moe_config, lambda config: config, new_moe, "model."
    ),
}


def new_model(family: Family, config: Config, seed: int) -> LanguageModel:
    """Return an initialised model in float32."""
    torch.manual_seed(seed)
    return family.new_model(family.text(config))
