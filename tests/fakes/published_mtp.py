"""Targets and their MTP modules in the forms of public checkpoints: random weights, one directory for both.

A module is transformers' `MtpLayer` around the decoder layer of the target's family.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from tests.unit.engine import families

DEEPSEEK = {"": "", "mtp_block.": "", "post_norm.": "shared_head.norm."}
MIMO = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "mtp_block.": "",
    "post_norm.": "final_layernorm.",
}
QWEN = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}


@dataclass(frozen=True)
class Published:
    """One form.

    Args:
        family: of `families.FAMILIES`.
        prefix: of the module's names.
        renamed: transformers' names to published ones.
        config: what config.json has over the target's.
        module: config values of the module's layer.
        hidden_first: order of the inputs of the projection.
        copies: tensors of the target that the module repeats.
        nested: the target's config is under text_config, and its tensors have the prefix of that part.
    """

    family: str
    prefix: str
    renamed: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    copies: tuple[str, ...] = ()
    nested: bool = False


COUNT = {"num_nextn_predict_layers": 1}
QWEN_COUNT = {"mtp_num_hidden_layers": 1}
FULL = {"layer_types": ["full_attention"]}
PUBLISHED: dict[str, Published] = {
    "deepseek-names-llama": Published("llama", "model.layers.2.", DEEPSEEK, COUNT),
    # XiaomiMiMo/MiMo-7B-RL
    "mimo": Published(
        "qwen2",
        "model.mtp_layers.0.",
        MIMO,
        {**COUNT, "architectures": ["MiMoForCausalLM"], "attention_bias": True, "model_type": "mimo"},
        hidden_first=True,
    ),
    # zai-org/GLM-4.5-Air: all layers after the first have experts
    "glm-4.5": Published(
        "glm4-moe-groups",
        "model.layers.2.",
        DEEPSEEK,
        COUNT,
        {"first_k_dense_replace": 0},
        copies=("embed_tokens", "shared_head.head"),
    ),
    # zai-org/GLM-4.5: no norms of queries and keys, biases
    "glm-4.5-biases": Published("glm4-moe", "model.layers.2.", DEEPSEEK, COUNT),
    # Qwen/Qwen3-Next-80B-A3B-Instruct: no key for the number of modules
    "qwen3-next": Published("qwen3-next", "mtp.", QWEN, module={**FULL, "mlp_only_layers": []}),
    # Qwen/Qwen3.5-27B and Qwen/Qwen3.5-35B-A3B
    "qwen3.5": Published("qwen3.5", "mtp.", QWEN, QWEN_COUNT, FULL),
    "qwen3.5-moe-nested": Published("qwen3.5-moe-tied", "mtp.", QWEN, QWEN_COUNT, FULL, nested=True),
}


@dataclass(frozen=True)
class Saved:
    """A directory and the transformers modules that it was saved from."""

    model: Any
    module: MtpLayer

    @torch.no_grad()
    def module_logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of the module for rows that read ids [n] and hidden states [n, H]."""
        index = torch.arange(len(ids))
        mask = torch.zeros(len(ids), len(ids)).masked_fill(index[:, None] < index, float("-inf"))
        base = self.model.get_decoder()
        embeds = self.model.get_input_embeddings()(ids)[None]
        angles = base.rotary_emb(embeds, index[None])
        out = self.module(embeds, hidden[None], angles, mask[None, None], index[None], None)
        logits: Tensor = self.model.lm_head(out)[0]
        return logits


def save(form: Published, path: Path) -> Saved:
    """Write the directory."""
    model = families.build(form.family)
    base = model.get_decoder()
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers = 1
    for key, value in form.module.items():
        setattr(config, key, value)
    config.mtp_hidden_states_first = form.hidden_first
    layer = base.layers[-1]
    norm = type(layer.input_layernorm)
    module = MtpLayer(config, type(layer), norm, 0).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, value in module.state_dict().items():
            value.normal_(std=0.2, generator=generator)
            if "norm" in key:
                value.add_(1.0)
    families.save(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, value in module.state_dict().items():
        tensors[form.prefix + _renamed(key, form.renamed)] = value.contiguous()
    for part in form.copies:
        source = "lm_head" if part.endswith("head") else f"model.{part}"
        tensors[f"{form.prefix}{part}.weight"] = tensors[f"{source}.weight"].clone()
    raw = {**json.loads((path / "config.json").read_text()), **form.config}
    if form.nested:
        name = raw["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        raw = {"architectures": [name], "text_config": raw}
        tensors = {re.sub(r"^model\.", "model.language_model.", key): value for key, value in tensors.items()}
    save_file(tensors, file)
    (path / "config.json").write_text(json.dumps(raw))
    return Saved(model, module)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    old = max((old for old in table if name.startswith(old)), key=len)
    return table[old] + name.removeprefix(old)
