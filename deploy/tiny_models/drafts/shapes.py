"""Builds config.json of each draft in the form that checkpoints of its kind have on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["eagle3", "eagle", "mtp", "standalone"]
KINDS: tuple[Kind, ...] = ("eagle3", "eagle", "mtp", "standalone")

ARCHITECTURES: dict[Kind, str] = {
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "EagleLlamaForCausalLM",
    "mtp": "LlamaForCausalLMNextN",
    "standalone": "LlamaForCausalLM",
}
DIRECTORIES: dict[Kind, str] = {kind: f"tiny-{kind}" for kind in KINDS}
CHAINED_STEPS = 5  # unrolled in training; published heads are used with 3 to 7 steps
MTP_MODULES = 3
DRAFT_VOCAB = 256
# residual streams entering these layers; not the default (2, 4, 5), so the key must be read
AUX_LAYERS = (2, 4, 7)


@dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions that the layers of a draft need from its config.json."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @staticmethod
    def of(config: Mapping[str, Any]) -> Dims:
        """Read them from a config.json."""
        return Dims(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        )


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind of draft that a config.json describes."""
    (architecture,) = config["architectures"]
    for kind, name in ARCHITECTURES.items():
        if name == architecture:
            return kind
    raise ValueError(f"{architecture!r} is none of {sorted(ARCHITECTURES.values())}")


def mtp_prefix(config: Mapping[str, Any], module: int) -> str:
    """Return the tensor prefix of an MTP module in DeepSeek's naming: it follows the last layer of the target."""
    return f"model.layers.{config['num_hidden_layers'] + module}."


def draft_config(kind: Kind, target: Mapping[str, Any]) -> dict[str, Any]:
    """Build config.json of a draft; everything that must agree is taken from the target's config."""
    config = {**target, "architectures": [ARCHITECTURES[kind]]}
    if kind == "standalone":
        return {**config, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384}
    config["target_hidden_size"] = target["hidden_size"]
    if kind == "mtp":
        # `mtp_chain` is a key of this project: module k reads module k-1's output (true) or the target's hidden state
        # (false).
        return {**config, "num_nextn_predict_layers": MTP_MODULES, "mtp_chain": True}
    config["num_hidden_layers"] = 1
    if kind == "eagle":
        return {**config, "intermediate_size": 416}
    return {
        **config,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_aux_hidden_state": True,
        },
        "aux_layer_convention": "boundary",
        "norm_before_residual": False,
    }
