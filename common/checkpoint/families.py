"""The model families, one row each: how the config.json of an architecture is read. No torch.

To add a family, write its row in `FAMILIES` and its config in `tests/unit/engine/families.py`, which compares it with
transformers. `common/engine/models/decoder.py` computes it if its layers are a mixer and a feed-forward of
`common/kv_cache/layer_kinds.py`; any other model is a `CausalLM` of its own, named in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.checkpoint.experts_config import (
    DEEPSEEK_V3,
    MIXTRAL,
    QWEN,
    QWEN_ALL_SHARED,
    QWEN_SHARED,
    ExpertRules,
)
from common.checkpoint.json_fields import Raw
from common.checkpoint.layer_norms import FOUR_NORMS, POST_NORM, PRE_NORM, LayerNorms


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The kinds of blocks of one decoder layer: keys of the tables in `common/kv_cache/layer_kinds.py`."""

    mixer: str = "attention"
    feed_forward: str = "dense"


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of one architecture's config.json from others. Values are defaults or key names."""

    qkv_bias: bool | str = False  # a str names the config key that decides
    output_bias: bool | str = False  # o_proj
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_whole: bool = False  # q_norm and k_norm cover all heads of a token together
    layer_norms: LayerNorms = PRE_NORM
    norm_float32: bool = False  # norms multiply by their weight before they round to the model's dtype
    norm_offset: bool = False  # norms multiply by 1 + weight, before they round
    activation: tuple[str, str] = ("hidden_act", "silu")  # key, and default
    # Embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype.
    embedding_scale: bool = False
    query_scalar: int | None = None  # default of `query_pre_attn_scalar`, whose -1/2th power scales scores
    fused: bool = False  # q, k and v projections are one tensor, and gate and up projections are one
    output_gate: bool = False  # q_proj also has a gate for each head of attention's output
    partial_rotary: float | None = None  # default of `partial_rotary_factor`; None: whole heads are rotated
    # A language model that is published with parts for other inputs, which are not loaded: its config may be under
    # text_config, its tensors under a prefix, and its rope may have sections, whose axes agree for text.
    text_part: bool = False
    head_dim: int | None = None  # default if config.json has none; None: hidden / heads
    # Defaults of `num_key_value_heads` (None: as many as heads) and `eos_token_id` if config.json has no such key.
    kv_heads: int | None = None
    eos: int | None = None
    # Default of `sliding_window` if config.json has no such key, 0: no window; None: the key is not read.
    window: int | None = None
    window_switch: bool = False  # windows only if `use_sliding_window` is true
    windows_by_layer: bool = False  # a switch, and max_window_layers or layer_types (Qwen)
    window_types: bool = False  # layer_types, if the file has it, names the layers with a window (Mistral)
    # Default of `sliding_window_pattern`: each layer of that number has no window (Gemma).
    window_interval: int | None = None
    # Layers with a window have a rope of their own, with this default theta; None: all layers have the same.
    window_theta: float | None = None
    # Values of keys that config.json may leave out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Key -> why a value other than null or false is refused.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Maps (config.json, layers, where) to the blocks of each layer; None: attention and a dense feed-forward in each.
    layer_kinds: Callable[[Raw, int, str], tuple[LayerKind, ...]] | None = None
    # The keys of a mixture of experts; the layers that have them follow from config.json.
    experts: ExpertRules | None = None
    # Some layers are gated delta networks; True if the rows of their projections are grouped by key head.
    gated_delta: bool | None = None
    engine: str = "common.engine.models.decoder:Decoder"  # "module:attribute" of its CausalLM


# Three of four layers are gated delta networks.
QWEN_HYBRID = Family(
    "attention_bias",
    "attention_bias",
    qk_norm=True,
    norm_offset=True,
    output_gate=True,
    partial_rotary=0.25,
    text_part=True,
    head_dim=256,
    kv_heads=4,
    gated_delta=False,
)
LLAMA = "LlamaForCausalLM"
# transformers' defaults, which published files leave out.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
GEMMA3 = Family(
    "attention_bias",
    "attention_bias",
    qk_norm=True,
    layer_norms=FOUR_NORMS,
    norm_offset=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    embedding_scale=True,
    query_scalar=256,
    text_part=True,
    head_dim=256,
    window=4096,
    window_interval=6,
    window_theta=10_000.0,
    eos=1,
    defaults=GEMMA3_DEFAULTS,
    refused={
        "final_logit_softcapping": "logits are not capped",
        "attn_logit_softcapping": "attention scores are not capped",
        "use_bidirectional_attention": "attention is causal",
    },
)
MIXTRAL_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
PHI3_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
FAMILIES: Mapping[str, Family] = {
    LLAMA: Family("attention_bias", "attention_bias", "mlp_bias", eos=2),
    "MistralForCausalLM": Family(window=4096, window_types=True, kv_heads=8, eos=2),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=4096, windows_by_layer=True, kv_heads=32),
    # The layers are Qwen2's; one more is a module of multi-token prediction (mtp_format.py).
    "MiMoForCausalLM": Family(qkv_bias=True, window=4096, windows_by_layer=True, kv_heads=32),
    "Qwen3ForCausalLM": Family(
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        head_dim=128,
        kv_heads=32,
        window=4096,
        windows_by_layer=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        window=4096,
        window_switch=True,
        kv_heads=4,
        experts=QWEN,
    ),
    "MixtralForCausalLM": Family(window=0, kv_heads=8, eos=2, experts=MIXTRAL, defaults=MIXTRAL_DEFAULTS),
    "Glm4MoeForCausalLM": Family(
        "attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary=0.5,
        kv_heads=8,
        defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 1},
        experts=DEEPSEEK_V3,
    ),
    "Qwen3NextForCausalLM": replace(
        QWEN_HYBRID, text_part=False, kv_heads=2, gated_delta=True, experts=QWEN_SHARED
    ),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), QWEN_HYBRID),
    **dict.fromkeys(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        replace(QWEN_HYBRID, kv_heads=2, experts=QWEN_ALL_SHARED),
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": Family(fused=True, partial_rotary=1.0, window=0, eos=32_000, defaults=PHI3_DEFAULTS),
    "Olmo2ForCausalLM": Family(
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        qk_norm_whole=True,
        layer_norms=POST_NORM,
        norm_float32=True,
        eos=50_279,
        defaults={"rms_norm_eps": 1e-5},
    ),
}
