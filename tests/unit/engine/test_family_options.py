"""Options of families that are built for one family and used by several: logits equal transformers' in float32."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.checkpoint.families import FAMILIES, Family
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.text_part import text_part
from common.engine.forward.model_runner import load_model
from common.errors import ModelError
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

GATED = Family(
    "attention_bias", "attention_bias", qk_norm=True, norm_offset=True, output_gate=True, partial_rotary=0.25,
    head_dim=256, text_part=True,
)  # fmt: skip
FLAT, NESTED = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
TEXT: dict[str, Any] = {
    **families.BASE,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
PROMPTS = (19, 1)
SEQUENCES = [
    torch.randint(families.VOCAB, (n + 4,), generator=torch.Generator().manual_seed(n)) for n in PROMPTS
]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of families that have these options in their attention layers."""
    for name in (FLAT, NESTED):
        monkeypatch.setitem(FAMILIES, name, GATED)


def randomise(model: Any, seed: int = 0) -> Any:
    """Make all parameters random; weights of these norms are offsets from 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
    model.set_attn_implementation("eager")
    return model.eval()


def flat_model(**values: Any) -> Any:
    text = copy.deepcopy({**TEXT, **values})  # transformers adds values to the rope
    return randomise(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text)))


def check(path: Path, reference: Any, chunk: int | None = 7) -> None:
    model = load_model(path)[0]
    actual = Driver(model, SEQUENCES, 16).run_all(chunk, PROMPTS)
    for ours, ids in zip(actual, SEQUENCES, strict=True):
        theirs = families.reference_logits(reference, ids)
        assert theirs.std() > 0.5  # the logits are not trivial
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {**families.YARN, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
    ],
)
def test_norm_offset_output_gate_and_partial_rotary(tmp_path: Path, values: dict[str, Any]) -> None:
    model = flat_model(**values)
    check(families.save(model, tmp_path), model)


def nested_model(path: Path) -> Any:
    """Save a model with a vision tower; return its language model's twin."""
    config = transformers.Qwen3_5Config(text_config=copy.deepcopy(TEXT), vision_config=VISION)
    model = randomise(transformers.Qwen3_5ForConditionalGeneration(config))
    families.save(model, path)
    return model


def test_the_language_model_of_a_checkpoint_with_a_vision_part(tmp_path: Path) -> None:
    """Its config is under text_config, its tensors are under model.language_model."""
    model = nested_model(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("model.visual.") for name in names)
    assert ModelConfig.load(tmp_path).vision is None
    check(tmp_path, model, None)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_copies_of_the_language_model_use_several_prefixes(tmp_path: Path, prefix: str) -> None:
    model = flat_model()
    families.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    head = "language_model." if prefix.startswith("language_model.") else ""
    renamed = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    check(tmp_path, model)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)]
)
def test_the_outer_config_decides_whether_the_head_is_tied(
    outer: bool | None, inner: bool, tied: bool
) -> None:
    """With the other value, a head of the checkpoint's own would be ignored."""
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": outer,
        "text_config": {"tie_word_embeddings": inner},
    }
    assert text_part(raw, "config.json")["tie_word_embeddings"] is tied


def test_a_text_config_takes_outer_values_that_it_does_not_have(tmp_path: Path) -> None:
    nested_model(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["text_config"].pop("tie_word_embeddings", None)
    raw["text_config"].update(dtype="float16", eos_token_id=None)
    file.write_text(json.dumps({**raw, "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = ModelConfig.load(tmp_path)
    assert (config.tie_word_embeddings, config.dtype, config.eos_token_ids) == (True, "float16", (5,))
    raw["text_config"] = []
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="text_config must be an object"):
        ModelConfig.load(tmp_path)


def test_gemma3_with_a_vision_part_serves_text(tmp_path: Path) -> None:
    """Published files name few values of the text model, and put its tensors under language_model.model."""
    text: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "vocab_size": families.VOCAB,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    reference = randomise(
        transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**copy.deepcopy(text)))
    )
    families.save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    others = {"vision_tower.patch": torch.zeros(1), "multi_modal_projector.weight": torch.zeros(1)}
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.tie_word_embeddings) == (8, 4, True)
    assert config.window_rope is not None
    assert (config.rope.kind, config.rope.theta, config.window_rope.theta) == ("linear", 1e6, 1e4)
    check(tmp_path, reference)


@pytest.mark.parametrize("max_tokens", [64, 65, None])
def test_longrope_has_one_set_of_factors_per_server(tmp_path: Path, max_tokens: int | None) -> None:
    """transformers takes the set by the length of a batch: equal where all its requests need the server's set."""
    original = 64 if max_tokens == 64 else 4
    model = families.build("phi3-longrope", original_max_position_embeddings=original)
    path = families.save(model, tmp_path)
    ours, config = load_model(path, max_tokens=max_tokens)
    assert config.rope.long == (original == 4)
    assert model_fingerprint(path) == model_fingerprint(path, 65)
    assert (model_fingerprint(path, 3) == model_fingerprint(path)) is False
    actual = Driver(ours, SEQUENCES, 16).run_all(5, PROMPTS)
    for found, ids in zip(actual, SEQUENCES, strict=True):
        torch.testing.assert_close(found, families.reference_logits(model, ids), atol=1e-4, rtol=0)


def test_embeddings_are_scaled_by_a_value_of_the_model_dtype(tmp_path: Path) -> None:
    """sqrt(48) is 6.9282; in bfloat16 it is 6.9375."""
    model = families.build("gemma3")
    ours = load_model(families.save(model, tmp_path, torch.bfloat16), "bfloat16")[0]
    ids = torch.arange(20)
    assert torch.equal(ours.embed(ids), model.model.embed_tokens(ids))
    assert not torch.equal(ours.embed(ids), (ours.embed_tokens(ids) * 48**0.5))


@pytest.mark.parametrize("factor", [0.3125, 0.01])
def test_an_odd_number_of_rotated_dimensions_is_refused(tmp_path: Path, factor: float) -> None:
    flat = {**TEXT, "architectures": [FLAT], "dtype": "float32", "partial_rotary_factor": factor}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with pytest.raises(ModelError, match=f"partial_rotary_factor {factor} rotates . of 16 dimensions"):
        ModelConfig.load(tmp_path)
