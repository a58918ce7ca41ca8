"""`quantization_config` of published FP8 checkpoints, by their form."""

from __future__ import annotations

from typing import Any

Section = dict[str, Any]


def _numbers(strategy: str, dynamic: bool, **more: Any) -> Section:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **more,
    }


def compressed(weights: Section, inputs: Section, ignore: list[str]) -> Section:
    """Return a section of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


BLOCKS: Section = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
}
TENSOR_DYNAMIC: Section = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "ignored_layers": ["lm_head"],
}
TENSOR_STATIC: Section = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
}
# RedHatAI/*-FP8-dynamic
CHANNEL_DYNAMIC = compressed(_numbers("channel", False), _numbers("token", True), ["lm_head"])
# neuralmagic/*-FP8
COMPRESSED_STATIC = compressed(_numbers("tensor", False), _numbers("tensor", False), ["re:.*lm_head"])
COMPRESSED_BLOCK = compressed(
    _numbers("block", False, block_structure=[128, 128]),
    _numbers("group", True, group_size=128),
    ["lm_head"],
)
INT4 = compressed(
    {**_numbers("group", False, group_size=128), "num_bits": 4, "type": "int"},
    _numbers("token", True),
    ["lm_head"],
)
MODELOPT: Section = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head", "model.layers.0.self_attn*"],
}
# hf_quant_config.json of the older files
MODELOPT_FILE: Section = {
    "producer": {"name": "modelopt", "version": "0.17.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
SECTIONS = {
    "blocks": BLOCKS,
    "tensor-dynamic": TENSOR_DYNAMIC,
    "tensor-static": TENSOR_STATIC,
    "channel-dynamic": CHANNEL_DYNAMIC,
    "compressed-static": COMPRESSED_STATIC,
    "compressed-block": COMPRESSED_BLOCK,
    "modelopt": MODELOPT,
}
