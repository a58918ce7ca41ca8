"""Keys of config.json that a file leaves out, states twice or calls otherwise: read as transformers reads them.

Most were found by tests/unit/engine/test_random_configs.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from common.checkpoint.families import FAMILIES
from common.checkpoint.llava_config import LANGUAGE_DEFAULTS, LANGUAGE_MODELS, llava_language
from common.checkpoint.model_config import ACTIVATIONS, ModelConfig
from common.checkpoint.qwen_vl_config import LANGUAGE_DEFAULTS as QWEN_VL_DEFAULTS
from common.checkpoint.rope_config import RopeConfig
from common.errors import ModelError
from tests.unit.engine import families

LINEAR = {"rope_type": "linear", "factor": 8.0}
SECTIONS = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
WITHOUT_THETA = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


def load(path: Path, architecture: str, **changes: Any) -> ModelConfig:
    """Load a config of one family; a value of `...` removes the key."""
    raw = {**families.BASE, "architectures": [architecture], "dtype": "float32", **changes}
    kept = {key: value for key, value in raw.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))
    return ModelConfig.load(path)


def rope(values: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(values["rope_type"], values["rope_theta"], values.get("factor", 1.0))


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": WITHOUT_THETA, "rope_theta": 3000.0, "rope_local_base_freq": 300.0},
        {"rope_parameters": {"full_attention": LINEAR}, "rope_local_base_freq": 300.0},
        {"rope_parameters": {"sliding_attention": LINEAR}, "rope_theta": 3000.0},
        {"rope_parameters": SECTIONS, "rope_theta": 3000.0, "rope_local_base_freq": 300.0},
        {"rope_parameters": SECTIONS, "rope_scaling": LINEAR, "rope_local_base_freq": 300.0},
        {"rope_scaling": LINEAR, "rope_theta": 3000.0, "rope_local_base_freq": 300.0},
    ],
)
def test_two_ropes_in_files_for_old_and_new_readers(values: dict[str, Any], tmp_path: Path) -> None:
    theirs: Any = transformers.Gemma3TextConfig(**copy.deepcopy(values)).rope_parameters
    ours = load(tmp_path, "Gemma3ForCausalLM", **values)
    assert (ours.rope, ours.window_rope) == (
        rope(theirs["full_attention"]),
        rope(theirs["sliding_attention"]),
    )


def test_sections_without_a_type_do_not_hide_the_theta_beside_them(tmp_path: Path) -> None:
    """Once the sections were taken out, the other key was read in the place of the empty one."""
    values = {
        "rope_scaling": {"mrope_section": [1, 1, 1], "mrope_interleaved": True},
        "rope_theta": 3000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0},
    }
    assert load(tmp_path, "Qwen3_5ForCausalLM", **values).rope.theta == 3000.0


@pytest.mark.parametrize(
    ("architecture", "kept", "left_out"),
    [
        ("MixtralForCausalLM", {}, {"num_local_experts": 8, "num_experts_per_tok": 2}),
        (
            "Glm4MoeForCausalLM",
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            {"n_shared_experts": 1},
        ),
    ],
)
def test_experts_that_a_file_leaves_out(
    architecture: str, kept: dict[str, Any], left_out: dict[str, Any], tmp_path: Path
) -> None:
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))()
    assert {key: getattr(made, key) for key in left_out} == left_out
    sparse = load(tmp_path, architecture, **kept)
    assert sparse == load(tmp_path, architecture, **kept, **left_out)
    assert sparse.experts is not None


@pytest.mark.parametrize(
    "architecture", [name for name in FAMILIES if name.endswith("ForCausalLM") and name != "MiMoForCausalLM"]
)
def test_heads_and_end_tokens_that_a_file_leaves_out(architecture: str, tmp_path: Path) -> None:
    name = architecture.removesuffix("ForCausalLM")
    made_by = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    whole = {**made_by(head_dim=128).to_dict(), "architectures": [architecture], "dtype": "float32"}
    for changes in ({}, {"eos_token_id": None}, {"vocab_size": 1}):
        raw = {
            key: value for key, value in whole.items() if key not in ("eos_token_id", "num_key_value_heads")
        }
        (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
        ours, theirs = ModelConfig.load(tmp_path), made_by.from_pretrained(tmp_path)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        known = theirs.eos_token_id is not None and theirs.eos_token_id < ours.vocab_size
        assert ours.eos_token_ids == ((theirs.eos_token_id,) if known else ())


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_text_config_of_llava_leaves_out_sizes(kind: str) -> None:
    """Early releases of transformers wrote only the keys of a nested config that differed from its class."""
    made = transformers.AutoConfig.for_model(kind)
    for key, value in LANGUAGE_DEFAULTS[LANGUAGE_MODELS[kind]].items():
        assert getattr(made, key) == value, key


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (False, False), (None, True)])
def test_either_config_of_llava_ties_the_head(outer: bool | None, inner: bool) -> None:
    values = {} if outer is None else {"tie_word_embeddings": outer}
    raw = {**values, "text_config": {"model_type": "llama", "tie_word_embeddings": inner}}
    theirs: Any = transformers.LlavaConfig(**copy.deepcopy(raw))
    assert llava_language(raw, "config.json")["tie_word_embeddings"] is theirs.tie_word_embeddings


def test_values_that_qwen_vl_leaves_out() -> None:
    made: Any = transformers.Qwen2_5_VLConfig().text_config
    known = {**QWEN_VL_DEFAULTS}
    assert made.rope_parameters["rope_theta"] == known.pop("rope_theta")
    assert {key: getattr(made, key) for key in known} == known


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_of_activations(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    ours = {
        "silu": torch.nn.functional.silu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
    }
    torch.testing.assert_close(ACT2FN[name](x), ours[ACTIVATIONS[name]], atol=1e-6, rtol=1e-6)


def test_positions_beyond_training_need_chunked_attention(tmp_path: Path) -> None:
    """Qwen2.5-1M has a million positions by attention in chunks; plain attention serves those of training."""
    chunks = {"chunk_size": 128, "local_size": 8, "original_max_position_embeddings": 120}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    ours = load(tmp_path, "Qwen2ForCausalLM", dual_chunk_attention_config=chunks, rope_scaling=yarn)
    assert ours.max_position_embeddings == 120
    assert ours.rope.original_max_positions == 256
    del chunks["original_max_position_embeddings"]
    plain = load(tmp_path, "Qwen2ForCausalLM", dual_chunk_attention_config=chunks)
    assert plain.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("yarn", "outer", "positions"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 256}, {}, 1024),
        ({"factor": 4.0}, {"original_max_position_embeddings": 256}, 1024),
        ({"factor": 2.0, "original_max_position_embeddings": 64}, {}, 256),
        ({"factor": 4.0}, {}, 256),
        ({"factor": 1e6, "original_max_position_embeddings": 1 << 27}, {}, 1 << 27),
    ],
)
def test_yarn_reaches_the_length_that_it_states(
    yarn: dict[str, Any], outer: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    """Qwen's instructions add it, and leave max_position_embeddings at the length of training."""
    ours = load(tmp_path, "Qwen2ForCausalLM", rope_scaling={"type": "yarn", **yarn}, **outer)
    assert ours.max_position_embeddings == positions


def test_queries_scaled_by_their_position_are_refused(tmp_path: Path) -> None:
    """Ministral 3's key: a file with another architecture would be computed without the scale."""
    values = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(
        ModelError, match=r"config.json: rope_parameters: llama_4_scaling_beta 0.1 is not supported"
    ):
        load(tmp_path, "MistralForCausalLM", rope_parameters=values)
