"""Random configs of every family, as files have them: keys left out, null, in their old and new forms.

Both sides read the same config.json, so a key that only one of them reads shows as other logits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.forward.model_runner import load_model
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

OUT = ...  # the key is left out
Keys = Mapping[str, tuple[Any, ...]]  # key -> values to choose from
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
EXAMPLES = 20 if "TANDEM_EXPLORE" in os.environ else 3
PROMPTS = (37, 18)
SEQUENCES = [torch.randint(88, (n + 3,), generator=torch.Generator().manual_seed(n)) for n in PROMPTS]

COMMON: Keys = {
    "num_hidden_layers": (1, 2, 3),
    "rms_norm_eps": (OUT, 1e-5, 0.1),
    "tie_word_embeddings": (OUT, True, False),
    "hidden_act": (OUT, "silu"),
    "attention_dropout": (OUT, 0.1),
    "pretraining_tp": (OUT, 2),
    "torch_dtype": (OUT, "bfloat16", None),
    "a_key_of_another_library": (OUT, {"a": [1]}),
}
BIAS: Keys = {"attention_bias": (OUT, False, True)}
GELU: Keys = {"hidden_act": (OUT, "silu", "gelu_pytorch_tanh", "gelu_new", "swish")}
WINDOWS: Keys = {
    "use_sliding_window": (OUT, True, True, False),
    "sliding_window": (OUT, 3, 11),
    "max_window_layers": (OUT, 0, 1),
    "layer_types": (OUT, OUT, (SLIDING, FULL)),
}
CHOICE: Keys = {"num_experts_per_tok": (1, 2, 3), "moe_intermediate_size": (20,)}
SPARSE: Keys = {
    "decoder_sparse_step": (OUT, 1, 2),
    "mlp_only_layers": (OUT, None, [], [0]),
    "norm_topk_prob": (OUT, True, False),
}
DELTA: Keys = {
    **BIAS,
    "rms_norm_eps": (0.01, 0.1),  # norms of tiny values amplify rounding
    "layer_types": (OUT, (LINEAR, FULL)),
    "full_attention_interval": (OUT, 1, 2),
    "linear_num_key_heads": (2,),
    "linear_num_value_heads": (2, 6),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (4, 12),
}
SHARED: Keys = {**CHOICE, "num_experts": (4,), "shared_expert_intermediate_size": (20, 40)}
GLM: Keys = {
    **BIAS,
    **CHOICE,
    "n_routed_experts": (8,),
    "n_shared_experts": (OUT, 2),
    "first_k_dense_replace": (OUT, 0, 2),
    "n_group": (OUT, 2),
    "topk_group": (OUT, 1),
    "use_qk_norm": (OUT, True),
    "norm_topk_prob": (OUT, False),
    "routed_scaling_factor": (OUT, 2.5),
}
GEMMA: Keys = {
    **BIAS,
    "hidden_activation": (OUT, "silu", "gelu_pytorch_tanh"),
    "sliding_window": (OUT, 3, 11),
    "sliding_window_pattern": (OUT, 1, 2),
    "layer_types": (OUT, (SLIDING, FULL)),
    "query_pre_attn_scalar": (OUT, 8),
    "rope_local_base_freq": (OUT, 200.0),
    "rope_theta": (OUT, 3000.0),
    "rope_parameters": (
        OUT,
        {FULL: {"rope_type": "linear", "factor": 4.0}},
        {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default", "rope_theta": 90.0}},
    ),
    "rope_scaling": (OUT, None, {"rope_type": "linear", "factor": 8.0}),
}
# architecture -> (model_type, whether head_dim may be given, default share of rotated dimensions, keys)
FAMILIES: Mapping[str, tuple[str, bool, float | None, Keys]] = {
    "LlamaForCausalLM": ("llama", True, None, {**GELU, **BIAS, "mlp_bias": (OUT, True)}),
    "MistralForCausalLM": ("mistral", True, None, {**GELU, "sliding_window": (OUT, None, 3, 11)}),
    "Qwen2ForCausalLM": ("qwen2", False, None, {**GELU, **WINDOWS}),
    "Qwen3ForCausalLM": ("qwen3", True, None, {**GELU, **BIAS, **WINDOWS}),
    "Gemma3ForCausalLM": ("gemma3_text", True, None, GEMMA),
    "Phi3ForCausalLM": ("phi3", False, 1.0, {**GELU, "sliding_window": (OUT, None, 9)}),
    "Olmo2ForCausalLM": ("olmo2", False, None, {**GELU, **BIAS}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        True,
        None,
        {**BIAS, **WINDOWS, "layer_types": (OUT,), **CHOICE, **SPARSE, "num_experts": (4,)},
    ),
    "MixtralForCausalLM": (
        "mixtral",
        True,
        None,
        {"num_local_experts": (4, OUT), "num_experts_per_tok": (OUT, 1, 3), "sliding_window": (OUT, None, 3)},
    ),
    "Glm4MoeForCausalLM": ("glm4_moe", True, 0.5, GLM),
    "Qwen3NextForCausalLM": ("qwen3_next", True, 0.25, {**DELTA, **SHARED, **SPARSE}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", True, 0.25, DELTA),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", True, 0.25, {**DELTA, **SHARED}),
}
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"kind": "default"},
    {"kind": "linear", "factor": 4},
    {"kind": "dynamic", "factor": 2.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
    {"kind": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    {"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0},
)


@st.composite
def configs(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Draw a config.json."""
    model_type, has_head_dim, partial, keys = FAMILIES[architecture]
    raw: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "vocab_size": 96}
    raw |= {"max_position_embeddings": 128, "intermediate_size": 40, "pad_token_id": 0, "eos_token_id": 2}
    raw |= {key: draw(st.sampled_from(values), label=key) for key, values in {**COMMON, **keys}.items()}
    heads, kv_heads, width = draw(st.sampled_from([(4, 2, 16), (6, 3, 8), (2, 2, 8), (3, 1, 24)]))
    raw |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * width}
    if has_head_dim:
        raw["head_dim"] = draw(st.sampled_from([16, 24]))
    if isinstance(raw.get("layer_types"), tuple):
        types = st.sampled_from(raw["layer_types"])
        raw["layer_types"] = [draw(types) for _ in range(raw["num_hidden_layers"])]
    if raw.get("use_sliding_window") is not True and "max_window_layers" in keys:
        raw["layer_types"] = OUT  # transformers fails for layers with a window that is off
    if raw.get("topk_group") == 1 and raw.get("n_group") is OUT:
        raw["topk_group"] = OUT
    if architecture != "Gemma3ForCausalLM":
        raw |= _rope(draw, partial, ROPES[:2] if architecture == "Phi3ForCausalLM" else ROPES)
    return {key: value for key, value in raw.items() if value is not OUT}


def _rope(draw: st.DrawFn, partial: float | None, ropes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Draw the keys of the rotary embedding, in the form of old or new files."""
    values = dict(draw(st.sampled_from(ropes), label="rope"))
    kind = values.pop("kind", None)
    if kind is not None:
        values[draw(st.sampled_from(["type", "rope_type"]))] = kind
    outer: dict[str, Any] = {"rope_theta": draw(st.sampled_from([OUT, 500.0, 1_000_000]), label="theta")}
    if partial is not None:
        share = draw(st.sampled_from([OUT, 0.5, 1.0]), label="share")
        draw(st.sampled_from([outer, values]))["partial_rotary_factor"] = share
    key = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    if key == "rope_parameters" and draw(st.booleans()):
        values["rope_theta"] = outer.pop("rope_theta")
    elif key == "rope_scaling" and kind is not None and draw(st.booleans()):
        outer["rope_parameters"] = {"rope_type": "default", "rope_theta": 90.0}
    inner = {name: value for name, value in values.items() if value is not OUT}
    return {**outer, key: inner or None}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("architecture", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_logits_are_those_of_transformers(directory: Path, architecture: str, data: st.DataObject) -> None:
    raw = data.draw(configs(architecture), label="config.json")
    file = directory / "config.json"
    file.write_text(json.dumps(raw))
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(directory),
        dtype=torch.float32,
        experts_implementation="eager",
    )
    model = families.randomise(made.eval())
    families.save(model, directory)
    file.write_text(json.dumps(raw))
    ours = load_model(directory, "float32")[0]
    chunk = None if "linear_num_key_heads" in raw else data.draw(st.sampled_from([None, 5, 16]))
    for found, ids in zip(Driver(ours, SEQUENCES, 4).run_all(chunk, PROMPTS), SEQUENCES, strict=True):
        expected = families.reference_logits(model, ids)
        tolerance = 2e-4 * max(1.0, float(expected.std()))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
