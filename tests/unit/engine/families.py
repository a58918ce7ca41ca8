"""Small random models of every supported family, built and saved by transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 96

BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
ALTERNATING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}

MOE = {"moe_intermediate_size": 28, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
GLM = {
    "moe_intermediate_size": 28,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
}

HYBRID = {
    # So large that norms of tiny values do not amplify rounding.
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 4.0, 9.0],
    "partial_rotary_factor": 0.5,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}

# name -> (transformers' name, config values over BASE)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3-scaling-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-mha": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "llama-yarn-biases": ("Llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-layer-types": ("Qwen2", ALTERNATING),
    "qwen2-max-window-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3-moe-dense-between": (
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts": 6},
    ),
    "qwen3-moe-window": ("Qwen3Moe", {**MOE, "use_sliding_window": True, "sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "head_dim": 16}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "glm4-moe": ("Glm4Moe", {**GLM, "n_routed_experts": 5, "n_shared_experts": 1, "attention_bias": True}),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            **GLM,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**HYBRID, **SHARED, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", HYBRID),
    "qwen3.5-moe-tied": ("Qwen3_5Moe", {**HYBRID, **SHARED, "tie_word_embeddings": True}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 3},
    ),
    "gemma3-ropes": (
        "Gemma3",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPE,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-longrope": (
        "Phi3",
        {"original_max_position_embeddings": 4, "rope_parameters": LONGROPE, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "qwen3-layer-types-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, **ALTERNATING}),
}


# The config of the text model, where it has another name than the model.
TEXT_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}


def build(name: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a float32 transformers model whose parameters are all random, so that each of them matters."""
    family, values = FAMILIES[name]
    made = getattr(transformers, TEXT_CONFIGS.get(family, f"{family}Config"))
    config = made(**copy.deepcopy({**BASE, **values, **overrides}))
    return randomise(getattr(transformers, f"{family}ForCausalLM")(config).eval(), seed)


def randomise(model: Any, seed: int = 0) -> Any:
    """Make all parameters random."""
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Some norms store their weight minus 1.
            one = "norm" in key and bool((parameter == 1).all())
            parameter.normal_(std=0.2, generator=generator)
            if one:
                parameter.add_(1.0)
        for key, buffer in model.named_buffers():
            if "correction" in key:
                # Large enough to change the choice of experts.
                buffer.normal_(std=0.5, generator=generator)
    return model


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write the model as a standard Hugging Face directory."""
    transformers.utils.logging.disable_progress_bar()
    model.to(dtype).save_pretrained(path, **options)
    return path


@torch.no_grad()
def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the float32 logits [n, V] for ids [n], from one forward without a cache."""
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0].float()
    return logits
