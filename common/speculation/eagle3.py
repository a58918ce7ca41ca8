"""`eagle3`: EAGLE-3 heads, which read the streams of several target layers and may have their own vocabulary."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.aux_layers import aux_layers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.json_fields import flag, optional_section, positive, shown
from common.checkpoint.model_config import ModelConfig
from common.errors import ModelError
from common.speculation.algorithm import Algorithm, DraftDirectory, Json
from common.speculation.head import head_model
from common.speculation.head_tensors import holds_eagle3

ARCHITECTURE = "LlamaForCausalLMEagle3"
MARK = "Eagle3"  # prefix or suffix of other architectures, which are checked by their tensors


def _fits(name: str, raw: Json) -> bool:
    return name.startswith(MARK) or name.endswith(MARK)


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    model, width = head_model(raw, file, target)
    aux = aux_layers(raw, target.num_layers, str(file))
    vocab = None
    if raw.get("draft_vocab_size") is not None:
        vocab = positive(raw, "draft_vocab_size", str(file), most=model.vocab_size)
    return DraftConfig(
        "eagle3",
        model,
        width,
        aux,
        vocab,
        _switch(raw, str(file), "norm_before_residual"),
        fc_norms=_fc_norms(raw, len(aux.boundaries) or 1, str(file)),
        norm_output=_switch(raw, str(file), "norm_output", "return_hidden_post_norm"),
    )


def _switch(raw: Json, where: str, *names: str) -> bool:
    """Return whether a switch is on under one of its names; NVIDIA's files have it in `eagle_config`."""
    section = optional_section(raw, "eagle_config", where)
    return any(flag(section if section.get(name) is not None else raw, name, where) for name in names)


def _fc_norms(raw: Json, parts: int, where: str) -> tuple[str, ...]:
    """Return the names of the norms' tensors: one norm over all of the target's states, or one per state."""
    whole, apart = (_switch(raw, where, name) for name in ("norm_before_fc", "fc_norm"))
    if whole and apart:
        raise ModelError(f"{where}: norm_before_fc and fc_norm norm the same values: set one of them")
    if apart:
        return tuple(f"fc_norm.{index}" for index in range(parts))
    return ("input_norm",) if whole else ()


def _from_speculators(raw: Json, where: str) -> Json:
    """Flatten a config.json of the speculators library, which has the layer's settings in a nested section.

    Source: https://github.com/vllm-project/speculators (config of eagle3).
    """
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    layer = raw.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise ModelError(
            f"{where}: speculators_model_type is {shown(kind)}; eagle3 is supported, with a transformer_layer_config"
        )
    if "norm_before_residual" not in raw:
        raise ModelError(
            f"{where}: norm_before_residual is missing, and libraries differ in its default; write true or false"
        )
    return {**layer, **raw, "architectures": [ARCHITECTURE]}


EAGLE3 = Algorithm(
    name="eagle3",
    directory=DraftDirectory(
        architectures=(ARCHITECTURE,),
        read=_read,
        model="common.node.loaded_draft:load_eagle3_head",
        fits=_fits,
        holds=holds_eagle3,
        flatten=_from_speculators,
        takes_embeds=True,
    ),
    trees=True,
    adaptive=True,
)
