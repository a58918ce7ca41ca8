"""Small replicas of published checkpoints: configs of the same structure, and the names and shapes of their tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 96,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HEADS, HEAD_DIM, LAYERS = 8, 16, 5


def shrink(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the same keys and structure, small enough to load in a moment."""
    if "text_config" in raw:
        return {**raw, "text_config": shrink(raw["text_config"])}
    small = {key: SMALL.get(key, value) for key, value in raw.items()}
    layers = small["num_hidden_layers"] = min(LAYERS, raw["num_hidden_layers"])
    if "layer_types" in raw:
        small["layer_types"] = raw["layer_types"][:layers]
    if "num_attention_heads" in raw:
        small["num_attention_heads"] = HEADS
        small["num_key_value_heads"] = max(
            1, HEADS * raw["num_key_value_heads"] // raw["num_attention_heads"]
        )
    if "head_dim" in raw:
        small["head_dim"] = HEAD_DIM
    if "short_factor" in (rope := raw.get("rope_scaling") or {}):
        dims = int(
            small.get("head_dim", small["hidden_size"] // HEADS) * raw.get("partial_rotary_factor", 1.0)
        )
        factors = {key: rope[key][: dims // 2] for key in ("short_factor", "long_factor")}
        small["rope_scaling"] = {**rope, **factors}
    return small


def tensors(architecture: str, raw: dict[str, Any], modules: bool) -> dict[str, Shape]:
    """Return the tensors of the published form of a small config."""
    text = raw.get("text_config", raw)
    prefix, head = "model.", ""
    if architecture == "Gemma3ForConditionalGeneration":
        prefix, head = "language_model.model.", "language_model."
    elif architecture.endswith("ForConditionalGeneration"):
        prefix = "model.language_model."
    size, vocab = text["hidden_size"], text.get("vocab_size", 262_208)
    found: dict[str, Shape] = {f"{prefix}embed_tokens.weight": (vocab, size), f"{prefix}norm.weight": (size,)}
    if not (text.get("tie_word_embeddings") or "Gemma3" in architecture):
        found[f"{head}lm_head.weight"] = (vocab, size)
    for layer in range(text["num_hidden_layers"]):
        for name, shape in _layer(architecture, text, layer):
            found[f"{prefix}layers.{layer}.{name}"] = shape
    if architecture.endswith("ForConditionalGeneration"):
        found["model.visual.patch" if prefix == "model.language_model." else "vision_tower.patch"] = (1,)
    if modules:
        last = text["num_hidden_layers"]
        extra = {"Glm4": f"model.layers.{last}.eh_proj", "MiMo": "model.mtp_layers.0.input_proj"}
        found[f"{extra.get(architecture[:4], 'mtp.fc')}.weight"] = (size, 2 * size)
    return found


def _layer(architecture: str, raw: dict[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    size = (raw["hidden_size"],)
    norms = ["post_attention_layernorm"]
    if architecture != "Olmo2ForCausalLM":
        norms.append("input_layernorm")
    if architecture == "Olmo2ForCausalLM" or "Gemma3" in architecture:
        norms.append("post_feedforward_layernorm")
    if "Gemma3" in architecture:
        norms.append("pre_feedforward_layernorm")
    yield from ((f"{norm}.weight", size) for norm in norms)
    hybrid = "full_attention_interval" in raw
    if hybrid and (layer + 1) % raw["full_attention_interval"]:
        yield from _gated_delta(architecture, raw)
    else:
        yield from _attention(architecture, raw, gate=hybrid)
    experts = next(
        (raw[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in raw), 0
    )
    if experts and layer >= raw.get("first_k_dense_replace", 0):
        yield from _experts(architecture, raw, experts)
    elif architecture == "Phi3ForCausalLM":
        inner = raw["intermediate_size"]
        yield "mlp.gate_up_proj.weight", (2 * inner, *size)
        yield "mlp.down_proj.weight", (*size, inner)
    else:
        yield from _mlp("mlp.", raw["hidden_size"], raw["intermediate_size"])


def _attention(architecture: str, raw: dict[str, Any], gate: bool) -> Iterator[tuple[str, Shape]]:
    size, heads, kv_heads = (
        raw["hidden_size"],
        raw.get("num_attention_heads", 8),
        raw.get("num_key_value_heads", 4),
    )
    dim = raw.get("head_dim", 256 if "Gemma3" in architecture else size // heads)
    rows = {"q": heads * dim * (2 if gate else 1), "k": kv_heads * dim, "v": kv_heads * dim}
    yield "self_attn.o_proj.weight", (size, heads * dim)
    if architecture == "Phi3ForCausalLM":
        yield "self_attn.qkv_proj.weight", (sum(rows.values()), size)
        return
    biased = architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM") or raw.get("attention_bias")
    for part, count in rows.items():
        yield f"self_attn.{part}_proj.weight", (count, size)
        if biased:
            yield f"self_attn.{part}_proj.bias", (count,)
    if architecture == "Olmo2ForCausalLM":
        yield "self_attn.q_norm.weight", (rows["q"],)
        yield "self_attn.k_norm.weight", (rows["k"],)
    elif architecture.startswith(("Qwen3", "Gemma3")) or raw.get("use_qk_norm"):
        yield "self_attn.q_norm.weight", (dim,)
        yield "self_attn.k_norm.weight", (dim,)


def _gated_delta(architecture: str, raw: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    size, keys, values = raw["hidden_size"], raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    key_rows, value_rows = keys * raw["linear_key_head_dim"], values * raw["linear_value_head_dim"]
    channels = 2 * key_rows + value_rows
    parts = {"qkv": channels, "z": value_rows, "b": values, "a": values}
    if architecture == "Qwen3NextForCausalLM":
        parts = {"qkvz": channels + value_rows, "ba": 2 * values}
    for part, rows in parts.items():
        yield f"linear_attn.in_proj_{part}.weight", (rows, size)
    yield "linear_attn.out_proj.weight", (size, value_rows)
    yield "linear_attn.conv1d.weight", (channels, 1, raw["linear_conv_kernel_dim"])
    yield "linear_attn.A_log", (values,)
    yield "linear_attn.dt_bias", (values,)
    yield "linear_attn.norm.weight", (raw["linear_value_head_dim"],)


def _experts(architecture: str, raw: dict[str, Any], count: int) -> Iterator[tuple[str, Shape]]:
    size = raw["hidden_size"]
    if architecture == "MixtralForCausalLM":
        inner = raw["intermediate_size"]
        yield "block_sparse_moe.gate.weight", (count, size)
        for index in range(count):
            for name, shape in (("w1", (inner, size)), ("w2", (size, inner)), ("w3", (inner, size))):
                yield f"block_sparse_moe.experts.{index}.{name}.weight", shape
        return
    inner = raw["moe_intermediate_size"]
    yield "mlp.gate.weight", (count, size)
    if architecture.startswith("Qwen3_5"):
        yield "mlp.experts.gate_up_proj", (count, 2 * inner, size)
        yield "mlp.experts.down_proj", (count, size, inner)
    else:
        for index in range(count):
            yield from _mlp(f"mlp.experts.{index}.", size, inner)
    if architecture == "Glm4MoeForCausalLM":
        yield "mlp.gate.e_score_correction_bias", (count,)
        yield from _mlp("mlp.shared_experts.", size, inner)
    if "shared_expert_intermediate_size" in raw:
        yield from _mlp("mlp.shared_expert.", size, raw["shared_expert_intermediate_size"])
        yield "mlp.shared_expert_gate.weight", (1, size)


def _mlp(prefix: str, size: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (inner, size)
    yield f"{prefix}up_proj.weight", (inner, size)
    yield f"{prefix}down_proj.weight", (size, inner)


def write_zeros(found: dict[str, Shape], file: Path) -> None:
    """Write a safetensors file of zeros in bfloat16, without using space on the disk."""
    header, at = {}, 0
    for name, shape in found.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
