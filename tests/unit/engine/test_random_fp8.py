"""Random FP8 checkpoints in every published form, compared with dequantised weights in transformers.

A section that says something that is not supported is refused with the name of the key.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.errors import ModelError
from tests.unit.engine import families
from tests.unit.engine.fp8_reference import Choice, Numbers, matching, quantise_model
from tests.unit.engine.paged_driver import Driver

Section = dict[str, Any]
EXAMPLES = 20 if "TANDEM_EXPLORE" in os.environ else 3
TEXTS = [torch.arange(5) * 7 + begin for begin in (0, 11, 29, 50)]
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
HYBRID = {"head_dim": 128, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-yarn-biases": SIZES,
    "qwen3": SIZES,
    "qwen3-moe": {**SIZES, "moe_intermediate_size": 144},
    "glm4-moe": {**SIZES, "moe_intermediate_size": 144},
    # Rows of queries and gates alternate by heads, which blocks of scales must not cut.
    "qwen3.5": {**SIZES, **HYBRID},
    "qwen3.5-moe-tied": {
        **SIZES,
        **HYBRID,
        "moe_intermediate_size": 144,
        "shared_expert_intermediate_size": 144,
    },
}
LAYER = "model.layers.1"
PRODUCTS = [f"{LAYER}.self_attn.{each}_proj" for each in "qkvo"]
PRODUCTS += [f"{LAYER}.mlp.{each}_proj" for each in ("gate", "up", "down")]


def numbers_of(strategy: str, dynamic: Any, **more: Any) -> Section:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": dynamic, **more}


# As compressed-tensors writes them: weights, inputs, and what they mean.
GROUPS: tuple[tuple[Section, Section, tuple[str, str]], ...] = (
    (numbers_of("channel", False), numbers_of("token", True), ("channel", "token")),
    (numbers_of("channel", False), numbers_of("tensor", False), ("channel", "tensor")),
    (numbers_of("tensor", False), numbers_of("token", True, symmetric=True), ("tensor", "token")),
    (numbers_of("tensor", False, symmetric=True), numbers_of("tensor", False), ("tensor", "tensor")),
    (
        numbers_of("block", False, block_structure=[128, 128]),
        numbers_of("group", True, group_size=128),
        ("block", "group"),
    ),
)


@st.composite
def fine_grained(draw: st.DrawFn, family: str) -> tuple[Section, Choice]:
    """Draw a section of `quant_method: fp8`."""
    blocks = draw(st.booleans())
    static = not blocks and draw(st.booleans())
    listed = [f"{LAYER}.self_attn", "model.layers.0", "lm_head", "mlp", *PRODUCTS, f"{LAYER}.mlp.gate"]
    ignored = [*draw(st.lists(st.sampled_from(listed), max_size=4)), "lm_head"]
    section: Section = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if blocks:
        section["weight_block_size"] = [128, 128]
    elif draw(st.booleans()):
        section["weight_block_size"] = None
    section |= draw(st.sampled_from([{}, {"fmt": "e4m3"}, {"fmt": "float8_e4m3fn"}]))
    section[draw(st.sampled_from(["modules_to_not_convert", "ignored_layers"]))] = ignored
    # transformers calls both scales otherwise than AutoFP8.
    names = (
        ("weight_scale_inv", "activation_scale") if draw(st.booleans()) else ("weight_scale", "input_scale")
    )
    numbers = Numbers(
        "block" if blocks else "tensor",
        "group" if blocks else "tensor" if static else "token",
        "weight_scale_inv" if blocks else names[0],
        names[1],
        draw(st.sampled_from([torch.float32, torch.bfloat16])) if blocks else torch.float32,
        draw(st.booleans()),
    )
    return section, lambda name: None if _whole_experts(family, name, ignored) else numbers


@st.composite
def compressed(draw: st.DrawFn, family: str) -> tuple[Section, Choice]:
    """Draw a section of compressed-tensors with one group for all products, or several for some of them."""
    split = draw(
        st.sampled_from([[["Linear"]], [["re:.*self_attn.*"], ["re:.*mlp.*"]], [["Linear"], PRODUCTS[:2]]])
    )
    ignored = ["lm_head"]
    choices = ["re:.*k_proj$", f"re:{LAYER.replace('.', '[.]')}[.]mlp.*", *PRODUCTS, "re:model.layers.0.*"]
    ignored += draw(st.lists(st.sampled_from(choices), max_size=3))
    bfloat16 = draw(st.booleans())
    groups, meant = {}, list[tuple[list[str], Numbers]]()
    for index, targets in enumerate(split):
        weights, inputs, (of_weights, of_inputs) = draw(st.sampled_from(GROUPS))
        groups[f"group_{index}"] = {"targets": targets, "weights": weights, "input_activations": inputs}
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        meant.append((targets, Numbers(of_weights, of_inputs, scale_dtype=dtype, wide=True)))
    section = {
        "quant_method": "compressed-tensors",
        "format": draw(st.sampled_from(["float-quantized", "naive-quantized"])),
        "quantization_status": draw(st.sampled_from(["compressed", "frozen"])),
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": draw(st.sampled_from([None, numbers_of("tensor", False)])),
    }

    def choice(name: str) -> Numbers | None:
        if name in ignored or any(each.startswith("re:") and matching([each], name) for each in ignored):
            return None
        for targets, numbers in reversed(meant):
            if name in targets or any(each.startswith("re:") and matching([each], name) for each in targets):
                return numbers
        return meant[0][1] if "Linear" in meant[0][0] else None

    # Experts of a layer are stored alike.
    return section, lambda name: choice(_first_expert(name)) if "experts" in name else choice(name)


@st.composite
def modelopt(draw: st.DrawFn, family: str) -> tuple[Section, Choice]:
    """Draw a section of ModelOpt."""
    listed = [
        "model.layers.0.self_attn*",
        "*.mlp.gate",
        f"{LAYER}.mlp*",
        "*o_proj",
        f"{LAYER}.self_attn.q_proj",
    ]
    ignored = [*draw(st.lists(st.sampled_from(listed), max_size=3)), "lm_head"]
    section: Section = {"quant_method": "modelopt", "quant_algo": "FP8"}
    section[draw(st.sampled_from(["exclude_modules", "ignore"]))] = ignored
    section |= draw(
        st.sampled_from(
            [{}, {"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": numbers_of("tensor", False)}]
        )
    )
    numbers = Numbers("tensor", "tensor", wide=draw(st.booleans()))
    return section, lambda name: None if _whole_experts(family, name, ignored) else numbers


def _first_expert(name: str) -> str:
    return ".".join(
        "0" if part.isdigit() and index > 2 else part for index, part in enumerate(name.split("."))
    )


def _whole_experts(family: str, name: str, ignored: list[str]) -> bool:
    return matching(ignored, _first_expert(name))


def nested(
    config: Section, section: Section, tensors: dict[str, torch.Tensor]
) -> tuple[Section, Section, dict[str, torch.Tensor]]:
    """Return the same as part of a model that also takes images, under the names that its checkpoint has."""
    inner = "model.language_model.layers"
    text = json.dumps(section).replace("model.layers", inner)
    text = text.replace("model[.]layers", inner.replace(".", "[.]"))
    [name] = config["architectures"]
    outer = {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": config,
    }
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    return outer, json.loads(text), renamed


FORMS = {"fp8": fine_grained, "compressed-tensors": compressed, "modelopt": modelopt}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_logits_are_those_of_dequantised_weights(
    directory: Path, family: str, form: str, data: st.DataObject
) -> None:
    section, choice = data.draw(FORMS[form](family), label="quantization_config")
    if family.startswith("qwen3.5"):
        # Rows of gates follow those of values, so that q_proj is two products if keys are stored otherwise.
        assume(len({choice(f"{LAYER}.self_attn.{part}_proj") for part in "qkv"}) == 1)
    seed = data.draw(st.integers(0, 1000), label="seed")
    model = families.build(family, seed, **FAMILIES[family])
    file = directory / "model.safetensors"
    families.save(model, directory)
    tensors = quantise_model(model, load_file(file), choice, seed)
    if any(section.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
        tensors |= {f"{LAYER}.self_attn.{name}": torch.tensor([0.5]) for name in ("k_scale", "v_scale")}
    config = json.loads((directory / "config.json").read_text())
    if family.startswith("qwen3.5") and data.draw(st.booleans(), label="nested"):
        config, section, tensors = nested(config, section, tensors)
    save_file(tensors, file)
    beside = directory / "hf_quant_config.json"
    beside.unlink(missing_ok=True)
    if form == "modelopt" and data.draw(st.booleans(), label="a file of its own"):
        beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    else:
        config["quantization_config"] = section
    (directory / "config.json").write_text(json.dumps(config))
    found = Driver(load_model(directory, "float32")[0], TEXTS, 4).run_all(None, [*map(len, TEXTS)])
    expected = torch.cat([families.reference_logits(model, text) for text in TEXTS])
    errors = (torch.cat(found) - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A value in the middle between two codes may be rounded the other way, which changes its token and later ones.
    assert errors.min() < 1e-4
    assert errors.median() < 0.1


# Where a value is (`*`: in any group), and the value.
UNSUPPORTED: dict[str, tuple[tuple[str, Any], ...]] = {
    "fp8": (
        ("fmt", "e5m2"),
        ("activation_scheme", "token"),
        ("weight_block_size", [128, 64]),
        ("weight_block_size", [1, 128]),
        ("kv_cache_scheme", "int8"),
        ("expert_dtype", "fp4"),
        ("modules_to_convert", ["model.embed_tokens"]),
        ("modules_to_not_convert", ["re:(a*)*b"]),
        ("ignored_layers", "lm_head"),
    ),
    "compressed-tensors": (
        ("config_groups.*.weights", None),
        ("config_groups.*.weights.num_bits", 4),
        ("config_groups.*.weights.type", "int"),
        ("config_groups.*.weights.symmetric", False),
        ("config_groups.*.weights.strategy", "group"),
        ("config_groups.*.weights.strategy", "tensor_group"),
        ("config_groups.*.weights.dynamic", True),
        ("config_groups.*.input_activations", None),
        ("config_groups.*.input_activations.num_bits", 16),
        ("config_groups.*.input_activations.type", "int"),
        ("config_groups.*.input_activations.symmetric", False),
        ("config_groups.*.input_activations.strategy", "channel"),
        ("config_groups.*.input_activations.dynamic", "local"),
        ("config_groups.*.output_activations", numbers_of("tensor", False)),
        ("config_groups.*.targets", "Linear"),
        ("config_groups", {}),
        ("kv_cache_scheme", {"type": "int", "num_bits": 8}),
        ("kv_cache_scheme", {"type": "float", "num_bits": 4}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("quantization_status", "calibration"),
        ("ignore", [5]),
    ),
    "modelopt": (
        ("quant_algo", "NVFP4"),
        ("quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("quant_algo", "MIXED_PRECISION"),
        ("kv_cache_quant_algo", "INT8"),
        ("kv_cache_scheme", {"type": "int", "num_bits": 8}),
        ("exclude_modules", "lm_head"),
        ("ignore", [""]),
    ),
}
DYNAMIC = "config_groups.*.input_activations.dynamic"


@pytest.mark.parametrize(
    ("form", "key", "value"), [(form, *each) for form, found in UNSUPPORTED.items() for each in found]
)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_what_is_not_supported_is_refused_by_name(
    directory: Path, form: str, key: str, value: Any, data: st.DataObject
) -> None:
    section = copy.deepcopy(data.draw(FORMS[form]("llama"), label="quantization_config")[0])
    *way, last = key.split(".")
    inside = section
    for step in way:
        step = data.draw(st.sampled_from(sorted(inside)), label="group") if step == "*" else step
        inside = inside[step]
    # Static activations per tensor are not dynamic at all, whatever the word.
    assume(key != DYNAMIC or inside["strategy"] != "tensor")
    inside[last] = value
    raw = {**families.BASE, "architectures": ["LlamaForCausalLM"], "quantization_config": section}
    (directory / "hf_quant_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config: .*{last}"):
        ModelConfig.load(directory)
