"""What `quantization_config` of an FP8 checkpoint may say, and how other quantization is refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoint.fp8_weights import CHANNEL, ONLINE, Fp8Scheme, Fp8Weights, matches
from common.checkpoint.weight_formats import stored_weights
from common.errors import ModelError
from tests.fakes.fp8_sections import (
    BLOCKS,
    CHANNEL_DYNAMIC,
    COMPRESSED_BLOCK,
    INT4,
    MODELOPT,
    SECTIONS,
    TENSOR_STATIC,
)

DESCRIBED = {
    "blocks": "fp8 (per block, dynamic activations)",
    "tensor-dynamic": "fp8 (per tensor, dynamic activations)",
    "tensor-static": "fp8 (per tensor, static activations)",
    "channel-dynamic": "fp8 (per channel, dynamic activations)",
    "compressed-static": "fp8 (per tensor, static activations)",
    "compressed-block": "fp8 (per block, dynamic activations)",
    "modelopt": "fp8 (per tensor, static activations)",
}


def parse(section: Any) -> Fp8Weights:
    stored = stored_weights({"quantization_config": section}, "config.json")
    assert isinstance(stored, Fp8Weights)
    return stored


def group_with(section: dict[str, Any], **changes: dict[str, Any] | None) -> dict[str, Any]:
    """Return a section of compressed-tensors with other numbers in its group; None removes them."""
    group = dict(section["config_groups"]["group_0"])
    for key, numbers in changes.items():
        group[key] = None if numbers is None else {**group[key], **numbers}
    return {**section, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("form", SECTIONS)
def test_published_sections_are_read(form: str) -> None:
    stored = parse(SECTIONS[form])
    assert stored.describe() == DESCRIBED[form]
    assert stored.scheme_of("lm_head") is None
    assert stored.scheme_of("model.layers.1.mlp.down_proj") is not None


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "mxfp4"}, "quantization mxfp4 is not supported; .* with model.quantization: fp8"),
        ({"quant_method": "gptq", "bits": 4}, "quantization gptq is not supported"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported is e4m3"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] is not supported"),
        ({**BLOCKS, "activation_scheme": "static"}, "activation_scheme static is not supported with"),
        ({**BLOCKS, "activation_scheme": None}, "activation_scheme None is not supported"),
        ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        ({**TENSOR_STATIC, "kv_cache_scheme": "int8"}, "kv_cache_scheme 'int8' is not supported, only FP8"),
        (INT4, "group_0: weights of type 'int' with num_bits 4 are not supported; use a checkpoint in FP8"),
        (group_with(CHANNEL_DYNAMIC, input_activations=None), "input_activations are not quantised"),
        (group_with(CHANNEL_DYNAMIC, weights={"strategy": "group"}), "strategy 'group' is not supported"),
        (group_with(CHANNEL_DYNAMIC, weights={"symmetric": False}), "symmetric False are not supported"),
        (
            group_with(CHANNEL_DYNAMIC, input_activations={"strategy": "tensor"}),
            "input_activations dynamic of strategy 'tensor' are not supported; .* strategy token",
        ),
        (
            group_with(COMPRESSED_BLOCK, weights={"block_structure": [64, 64]}),
            r"block_structure \[64, 64\] is not supported",
        ),
        ({**CHANNEL_DYNAMIC, "config_groups": {}}, "config_groups must have 1 to 64 groups, found 0"),
        ({**CHANNEL_DYNAMIC, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not supported"),
        ({**CHANNEL_DYNAMIC, "quantization_status": "calibration"}, "'calibration' is not supported"),
        (
            {**CHANNEL_DYNAMIC, "transform_config": {"config_groups": {"R3": {}}}},
            "transform_config is not supported",
        ),
        ({**CHANNEL_DYNAMIC, "ignore": ["re:(a+)+$"]}, "has a repeated group"),
        ({**CHANNEL_DYNAMIC, "ignore": ["re:a*a*a*a*a*b"]}, "more than 4 repetitions"),
        ({**CHANNEL_DYNAMIC, "ignore": ["re:["]}, r"ignore: '\[' is not a regular expression"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not supported; supported is FP8"),
        (
            {**MODELOPT, "kv_cache_scheme": {"type": "int", "num_bits": 8}},
            r"kv_cache_scheme \('int', 8\) is not supported, only FP8",
        ),
    ],
)
def test_other_quantization_is_refused_by_name(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: quantization_config: .*{said}"):
        parse(section)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.3", "model.layers.3.mlp.up_proj", True),
        ("model.layers.3", "model.layers.31.mlp.up_proj", False),
        ("model.language_model.layers.3.mlp", "model.layers.3.mlp.up_proj", True),
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.3.self_attn.q_proj", False),
        ("re:language_model[.]model[.]layers", "model.layers.3.mlp.up_proj", True),
        ("exact:model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj", True),
        ("exact:model.language_model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj", True),
        ("exact:mlp.up_proj", "model.layers.3.mlp.up_proj", False),
        ("exact:model.layers.3.mlp", "model.layers.3.mlp.up_proj", False),
        ("glob:model.layers.3.*", "model.layers.3.mlp.up_proj", True),
        ("glob:*router*", "model.layers.3.mlp.up_proj", False),
        ("Linear", "anything", True),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def compressed_groups(*groups: tuple[str, list[str]], ignore: list[str] | None = None) -> Fp8Weights:
    """Read a section of compressed-tensors with these groups: the weights' strategy and the targets of each."""
    sections = {
        f"group_{index}": {
            **group_with(CHANNEL_DYNAMIC, weights={"strategy": strategy})["config_groups"]["group_0"],
            "targets": targets,
        }
        for index, (strategy, targets) in enumerate(groups)
    }
    return parse({**CHANNEL_DYNAMIC, "config_groups": sections, "ignore": ignore or []})


UP, QUERY = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("reverse", [False, True])
def test_the_most_specific_target_of_groups_decides(reverse: bool) -> None:
    """A whole name counts before an expression, and an expression before a class, in whatever order groups are."""
    groups = [("tensor", ["re:.*mlp.*"]), ("channel", ["Linear"])]
    if reverse:
        groups.reverse()
    stored = compressed_groups(*groups)
    assert stored.scheme_of(UP) == Fp8Scheme("tensor")
    assert stored.scheme_of(QUERY) == Fp8Scheme(CHANNEL)
    named = compressed_groups(("channel", [UP]), ("tensor", ["re:.*mlp.*", "Linear"]))
    assert named.scheme_of(UP) == Fp8Scheme(CHANNEL)
    assert named.scheme_of(QUERY) == Fp8Scheme("tensor")


def test_of_two_expressions_the_first_by_alphabet_decides() -> None:
    stored = compressed_groups(("tensor", ["re:.*up_proj"]), ("channel", ["re:.*mlp.*"]))
    assert stored.scheme_of(UP) == Fp8Scheme(CHANNEL)


def test_of_two_groups_with_one_target_the_last_decides() -> None:
    stored = compressed_groups(("tensor", ["Linear"]), ("channel", ["Linear"]))
    assert stored.scheme_of(UP) == Fp8Scheme(CHANNEL)


def test_compressed_tensors_names_products_as_a_whole() -> None:
    """Parts of names match in other forms, where checkpoints list them."""
    stored = compressed_groups(("tensor", ["Linear"]), ignore=["mlp.up_proj", "model.layers.0", QUERY])
    assert stored.scheme_of(UP) == Fp8Scheme("tensor")
    assert stored.scheme_of(QUERY) is None
    parts = compressed_groups(("tensor", ["mlp"]))
    assert parts.scheme_of(UP) is None
    assert compressed_groups(("tensor", ["Module"])).scheme_of(UP) == Fp8Scheme("tensor")
    assert compressed_groups(("tensor", ["Linear"]), ignore=["Linear"]).scheme_of(UP) is None


def test_what_stays_dense_at_load_time() -> None:
    dense = ("lm_head", "model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_ba")
    assert [ONLINE.scheme_of(name) for name in dense] == [None, None, None]
    assert ONLINE.scheme_of("model.layers.0.linear_attn.in_proj_qkv") == Fp8Scheme(CHANNEL)
