"""config.json and generation_config.json as this project reads them, compared with transformers; and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.checkpoint.generation_config import DefaultSampling
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.rope_config import RopeConfig
from common.engine.ops.rotary import inverse_frequencies
from common.errors import ModelError
from tests.unit.engine import families

RAW: Mapping[str, Any] = {**families.BASE, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def write(path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path: Path, **changes: Any) -> ModelConfig:
    """Load RAW with changes; a value of `...` removes the key."""
    raw = {key: value for key, value in {**RAW, **changes}.items() if value is not ...}
    return ModelConfig.load(write(path, raw))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model = families.build(name)
    theirs, config = model.config, ModelConfig.load(families.save(model, tmp_path))
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert config.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.eos_token_ids == (2,)
    attention = next(each.self_attn for each in model.model.layers if hasattr(each, "self_attn"))
    assert config.head_dim == attention.head_dim
    queries = attention.qkv_proj if config.fused else attention.q_proj
    assert config.qkv_bias == (queries.bias is not None)
    assert config.output_bias == (attention.o_proj.bias is not None)
    dense = [hasattr(layer.mlp, "down_proj") for layer in model.model.layers]
    assert [config.kind_of(layer).feed_forward == "dense" for layer in range(config.num_layers)] == dense
    if dense[0]:
        assert config.mlp_bias == (model.model.layers[0].mlp.down_proj.bias is not None)
    assert config.attention_scale in (None, pytest.approx(attention.scaling))
    check_rope(config.rope, config.head_dim, model, "" if config.window_rope is None else "full_attention_")
    if config.window_rope is not None:
        check_rope(config.window_rope, config.head_dim, model, "sliding_attention_")


def check_rope(rope: RopeConfig, head_dim: int, model: Any, prefix: str) -> None:
    """Compare with the buffers of transformers whose names begin with `prefix`."""
    module = model.model.rotary_emb
    if rope.kind == "longrope":
        rope = rope.for_length(rope.original_max_positions)  # transformers begins with the short set
    frequencies = inverse_frequencies(rope, rope.rotated_dims(head_dim))
    torch.testing.assert_close(frequencies, getattr(module, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(getattr(module, f"{prefix}attention_scaling"))


ROPES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        key: families.LLAMA3[key] for key in families.LLAMA3 if key not in ("rope_type", "rope_theta")
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn-explicit": {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.9,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_old_rope_scaling_and_new_rope_parameters_read_alike(name: str, key: str, tmp_path: Path) -> None:
    kind, values = name.partition("-")[0], ROPES[name]
    old = load(tmp_path, rope_theta=5000.0, rope_scaling={key: kind, **values}).rope
    new = load(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **values}).rope
    assert old == new
    assert old.theta == 5000.0
    from transformers import LlamaConfig

    parameters = {"rope_type": kind, "rope_theta": 5000.0, **values}
    theirs = LlamaConfig(**{**families.BASE, "rope_parameters": parameters})
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(old, 12), inv_freq, rtol=1e-6, atol=0)
    assert old.attention_factor == pytest.approx(factor)


def test_the_original_length_beside_the_rope_parameters_wins(tmp_path: Path) -> None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert load(tmp_path, rope_scaling=yarn).rope.original_max_positions == 64
    outer = load(tmp_path, rope_scaling=yarn, original_max_position_embeddings=32)
    assert outer.rope.original_max_positions == 32
    del yarn["original_max_position_embeddings"]
    assert load(tmp_path, rope_scaling=yarn).rope.original_max_positions == 256  # max_position_embeddings


def test_plain_rope_of_old_and_new_configs(tmp_path: Path) -> None:
    assert load(tmp_path).rope == RopeConfig(theta=10_000.0)
    assert load(tmp_path, rope_theta=1e6, rope_scaling=None).rope == RopeConfig(theta=1e6)
    assert load(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope.theta == 1e6


def test_defaults_of_a_sparse_config(tmp_path: Path) -> None:
    config = load(tmp_path, num_key_value_heads=..., head_dim=None, torch_dtype="torch.float16", dtype=...)
    assert config.num_kv_heads == 4
    assert config.head_dim == 12
    assert config.dtype == "float16"
    assert config.sliding_windows == (None, None)
    assert load(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert load(tmp_path, architectures=["MistralForCausalLM"]).sliding_windows == (4096, 4096)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert load(tmp_path, **qwen).sliding_windows == (None, None)
    # sliding windows would start only at layer 28
    assert load(tmp_path, **qwen, use_sliding_window=True).sliding_windows == (None, None)
    assert load(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1).sliding_windows == (None, 9)


def test_windows_of_mistral_models_are_for_the_layers_that_layer_types_names(tmp_path: Path) -> None:
    """transformers reads such files of MistralForCausalLM as those of Ministral."""
    types = ["sliding_attention", "full_attention"]
    mistral = {"architectures": ["MistralForCausalLM"], "layer_types": types}
    assert load(tmp_path, **mistral, sliding_window=9).sliding_windows == (9, None)
    assert load(tmp_path, **mistral, sliding_window=None).sliding_windows == (None, None)
    with pytest.raises(ModelError, match="layer_types must name sliding_attention, full_attention"):
        load(tmp_path, **{**mistral, "layer_types": ["full_attention"]}, sliding_window=9)


def test_values_that_a_file_may_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    mixtral = load(tmp_path, architectures=["MixtralForCausalLM"], **mixture)
    assert (mixtral.rms_norm_eps, mixtral.rope.theta) == (1e-5, 1e6)
    glm = load(tmp_path, architectures=["Glm4MoeForCausalLM"], **mixture)
    assert (glm.rms_norm_eps, glm.rope.theta) == (1e-5, 10_000.0)


def test_generation_config_gives_eos_ids_and_sampling_defaults(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [5, 2, 5],
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 512,
        "max_length": 20,
    }
    config = ModelConfig.load(write(tmp_path, RAW, generation))
    assert config.eos_token_ids == (5, 2)
    assert config.default_sampling == DefaultSampling(0.6, 0.95, 0, 0.05, 1.05, 512)
    config = ModelConfig.load(write(tmp_path, {**RAW, "eos_token_id": [7, 8]}, {"eos_token_id": None}))
    assert config.eos_token_ids == (7, 8)
    assert config.default_sampling == DefaultSampling()
    assert ModelConfig.load(write(tmp_path, {**RAW, "eos_token_id": None}, {})).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            ["architecture FalconForCausalLM", "LlamaForCausalLM, Mistral"],
        ),
        ({"architectures": ..., "auto_map": {"AutoModel": "evil.Model"}}, ["without architectures", "Qwen3"]),
        ({"architectures": []}, ["without architectures"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization gptq", "bfloat16"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype float8_e4m3fn", "float32, bfloat16, float16"]),
        ({"hidden_size": ...}, ["hidden_size", "None"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"head_dim": 7}, ["head_dim 7"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"attention_bias": 1}, ["attention_bias", "1"]),
        ({"eos_token_id": 4000}, ["eos_token_id 4000", "96"]),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            ["'proportional'", "default, linear, llama3, yarn, dynamic, longrope"],
        ),
        ({"rope_scaling": {"type": "longrope"}}, ["'longrope'", "short_factor"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["'dynamic'", "factor"]),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5}},
            ["6 short and 5 long factors"],
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 5, "long_factor": [1.0] * 5}},
            ["5 factors for 6 frequencies"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0] * 6, "long_factor": [1.0] * 6}},
            ["short_factor", "positive number"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            ["final_logit_softcapping 30.0", "not capped"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            ["use_bidirectional_attention True", "causal"],
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": None}, ["sliding_window", "None"]),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]},
            ["layer_types", "2 layers"],
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
            ["hidden_activation 'gelu'", "silu, swish, gelu_pytorch_tanh"],
        ),
        (
            # It would also be the activation of gated delta layers, which have silu.
            {"architectures": ["Qwen3_5ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
            ["hidden_act 'gelu_pytorch_tanh'", "silu"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, ["factor", "at least 0.001"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        (
            {"rope_scaling": {**ROPES["llama3"], "rope_type": "llama3", "low_freq_factor": 9.0}},
            ["low_freq_factor"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked"] * 2,
            },
            ["layer_types", "sliding_attention, full_attention"],
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            ["layer_types", "2 layers"],
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window", "0"]),
    ],
)
def test_refusals_name_what_was_found_and_what_is_supported(
    changes: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as refusal:
        load(tmp_path, **changes)
    for words in (*said, "config.json"):
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_k": "5"},
        {"temperature": True},
        {"max_new_tokens": 0},
        {"eos_token_id": 4000},
    ],
)
def test_generation_values_out_of_range_are_refused(generation: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelConfig.load(write(tmp_path, RAW, generation))


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist: correct the path"):
        ModelConfig.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is empty"):
        ModelConfig.load(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            ModelConfig.load(tmp_path)


def test_a_config_without_dtype_takes_that_of_the_weights(tmp_path: Path) -> None:
    path = families.save(families.build("llama"), tmp_path, torch.bfloat16)
    raw = json.loads((path / "config.json").read_text())
    del raw["dtype"]
    write(path, raw)
    assert ModelConfig.load(path).dtype == "bfloat16"


def test_the_control_plane_reads_configs_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, common.checkpoint.model_config; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fingerprint_tells_models_apart_and_nothing_else(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        families.save(families.build("llama", seed), path)
    a, b, other_values = map(model_fingerprint, paths)
    assert a == b
    assert len(a) == 64
    assert a != other_values  # same headers, different weights
    config = json.loads((paths[1] / "config.json").read_text())
    write(paths[1], {**config, "eos_token_id": 3, "transformers_version": "9"}, {"temperature": 0.5})
    assert model_fingerprint(paths[1]) == a
    write(paths[1], {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    assert model_fingerprint(paths[1]) != a
