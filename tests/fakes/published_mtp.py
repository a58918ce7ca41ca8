"""Targets and their MTP modules in the forms of public checkpoints: random weights, one directory for both.

A module is transformers' `MtpLayer` around the decoder layer of the target's family, or of MiMo-V2.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiMoV2FlashConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashDecoderLayer,
    MiMoV2FlashRMSNorm,
    MiMoV2FlashRotaryEmbedding,
)

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
    "mtp_block.": "layers.{}.",
    "post_norm.": "norm.",
}
MIMO_V2 = {
    "": "",
    "mtp_block.": "",
    "mtp_block.post_attention_layernorm.": "pre_mlp_layernorm.",
    "post_norm.": "final_layernorm.",
}


@dataclass(frozen=True)
class Published:
    """One form.

    Args:
        family: of `families.FAMILIES`.
        prefix: of a module's names, with a place for its number.
        renamed: transformers' names to published ones.
        config: what config.json has over the target's.
        module: config values of the module's layer.
        first: number of the first module.
        count: key for the number of modules; None: there is none.
        shared: the modules differ only in their decoder layers.
        chain: modules read the output of the previous one.
        before_norm: modules read the target's hidden state before its final norm.
        hidden_first: order of the inputs of the projection.
        copies: tensors of the target that a module repeats.
        nested: the target's config is under text_config, and its tensors have the prefix of that part.
        apart: architecture of the modules if they are in a directory of their own.
    """

    family: str
    prefix: str
    renamed: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    count: str | None = "num_nextn_predict_layers"
    shared: bool = False
    chain: bool = True
    before_norm: bool = False
    hidden_first: bool = False
    copies: tuple[str, ...] = ()
    nested: bool = False
    apart: str | None = None


QWEN_COUNT = "mtp_num_hidden_layers"
FULL = {"layer_types": ["full_attention"]}
PUBLISHED: dict[str, Published] = {
    "deepseek-names-llama": Published("llama", "model.layers.{}.", DEEPSEEK, first=2),
    # XiaomiMiMo/MiMo-7B-RL
    "mimo": Published(
        "qwen2",
        "model.mtp_layers.{}.",
        MIMO,
        {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "model_type": "mimo"},
        chain=False,
        hidden_first=True,
    ),
    # zai-org/GLM-4.5-Air: all layers after the first have experts
    "glm-4.5": Published(
        "glm4-moe-groups",
        "model.layers.{}.",
        DEEPSEEK,
        module={"first_k_dense_replace": 0},
        first=2,
        copies=("embed_tokens", "shared_head.head"),
    ),
    # zai-org/GLM-4.5: no norms of queries and keys, biases
    "glm-4.5-biases": Published("glm4-moe", "model.layers.{}.", DEEPSEEK, first=2),
    # Qwen/Qwen3-Next-80B-A3B-Instruct: no key for the number of modules if there is one
    "qwen3-next": Published(
        "qwen3-next", "mtp.", QWEN, module={**FULL, "mlp_only_layers": []}, count=QWEN_COUNT, shared=True
    ),
    # Qwen/Qwen3.5-27B and Qwen/Qwen3.5-35B-A3B
    "qwen3.5": Published("qwen3.5", "mtp.", QWEN, module=FULL, count=QWEN_COUNT, shared=True),
    "qwen3.5-moe-nested": Published(
        "qwen3.5-moe-tied", "mtp.", QWEN, module=FULL, count=QWEN_COUNT, shared=True, nested=True
    ),
    # XiaomiMiMo/MiMo-V2-Flash, without sinks and with values as wide as keys
    "mimo-v2": Published(
        "qwen3",
        "model.mtp.layers.{}.",
        MIMO_V2,
        {
            "layernorm_epsilon": 1e-5,
            "hybrid_layer_pattern": [0, 1],
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 24,
            "swa_v_head_dim": 24,
            "swa_rope_theta": 300.0,
            "partial_rotary_factor": 0.334,
            "sliding_window": 4,
            "sliding_window_size": 4,
            "attention_value_scale": 0.707,
            "add_swa_attention_sink_bias": False,
            "num_attention_heads": 12,
            "head_dim": 8,
        },
        count=None,
        chain=False,
        before_norm=True,
        apart="MiMoV2FlashForCausalLM",
    ),
}


@dataclass(frozen=True, eq=False)
class Saved:
    """Directories, and the transformers modules that they were saved from."""

    form: Published
    target: Path
    draft: Path
    model: Any
    modules: tuple[MtpLayer, ...]
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # embeddings and positions to cosines and sines
    window: int  # number of keys that a query of a module sees, its own included

    @torch.no_grad()
    def module_rows(self, index: int, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, V] and outputs [n, H] of a module for rows that read ids [n] and hidden states [n, H]."""
        at = torch.arange(len(ids))
        seen = (at[:, None] >= at) & (at[:, None] - at < self.window)
        mask = torch.zeros(len(ids), len(ids)).masked_fill(~seen, float("-inf"))
        embeds = self.model.get_input_embeddings()(ids)[None]
        angles = self.rotary(embeds, at[None])
        out: Tensor = self.modules[index](embeds, hidden[None], angles, mask[None, None], at[None], None)
        return self.model.lm_head(out)[0], out[0]

    @torch.no_grad()
    def target_hidden(self, text: list[int]) -> Tensor:
        """Return the hidden states [n, H] of the target that modules read."""
        base, kept = self.model.get_decoder(), list[Tensor]()
        hook = base.norm.register_forward_pre_hook(lambda norm, inputs: kept.append(inputs[0]))
        normed = base(torch.tensor(text)[None], use_cache=False).last_hidden_state
        hook.remove()
        hidden: Tensor = kept[-1] if self.form.before_norm else normed
        return hidden[0]

    def drafts(self, text: list[int], steps: int) -> list[int]:
        """Return what each module drafts after `text`, whose last token the target has not read.

        Everything is computed from the start of the text, module by module.
        """
        known, hidden = list(text), self.target_hidden(text[:-1])
        for step in range(steps):
            ids = torch.tensor(known[1 + step : 1 + step + len(hidden)])
            logits, out = self.module_rows(step, ids, hidden)
            known.append(int(logits[-1].argmax()))
            hidden = out if self.form.chain else hidden
        return known[len(text) :]

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def answer(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Return the greedy continuation of a prompt, for which everything is computed again for each token."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(families.reference_logits(self.model, torch.tensor(ids))[-1].argmax()))
        return ids[len(prompt) :]


def save(form: Published, path: Path, count: int = 1) -> Saved:
    """Write a target with `count` modules, to one directory or to two."""
    model = families.build(form.family)
    modules, rotary, window = _modules(form, model, count)
    families.save(model, path)
    file = path / "model.safetensors"
    tensors, own = load_file(file), dict[str, Tensor]()
    for index, module in enumerate(modules):
        number = form.first + index
        for key, value in module.state_dict().items():
            if not key.endswith("sinks"):
                own[(form.prefix + _renamed(key, form.renamed)).format(number)] = value.clone()
        for part in form.copies:
            source = "lm_head" if part.endswith("head") else f"model.{part}"
            own[f"{form.prefix}{part}.weight".format(number)] = tensors[f"{source}.weight"].clone()
    raw = json.loads((path / "config.json").read_text())
    counted = {} if form.count is None or (form.shared and count == 1) else {form.count: count}
    draft = path
    if form.apart is not None:
        draft = path / "modules"
        draft.mkdir()
        save_file(own, draft / "model.safetensors")
        apart = {**raw, **form.config, **counted, "architectures": [form.apart]}
        (draft / "config.json").write_text(json.dumps(apart))
    else:
        raw, tensors = {**raw, **form.config, **counted}, tensors | own
    if form.nested:
        name = raw["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        raw = {"architectures": [name], "text_config": raw}
        tensors = {re.sub(r"^model\.", "model.language_model.", key): value for key, value in tensors.items()}
    save_file(tensors, file)
    (path / "config.json").write_text(json.dumps(raw))
    return Saved(form, path, draft, model, modules, rotary, window)


def _modules(form: Published, model: Any, count: int) -> tuple[tuple[MtpLayer, ...], Any, int]:
    """Return random modules, their rotary embedding and their window."""
    base = model.get_decoder()
    if form.apart is not None:
        config, layer, norm = _mimo_v2_config(form, model), MiMoV2FlashDecoderLayer, MiMoV2FlashRMSNorm
        rotary = functools.partial(MiMoV2FlashRotaryEmbedding(config), layer_type="sliding_attention")
        window = config.sliding_window
    else:
        config = copy.deepcopy(model.config.get_text_config())
        config.num_hidden_layers = 1
        for key, value in form.module.items():
            setattr(config, key, value)
        layer, norm = type(base.layers[-1]), type(base.layers[-1].input_layernorm)
        rotary, window = base.rotary_emb, 1 << 20
    config.mtp_hidden_states_first = form.hidden_first
    modules = tuple(MtpLayer(config, layer, norm, 0).eval() for _ in range(count))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for index, module in enumerate(modules):
            for key, value in module.state_dict().items():
                value.normal_(std=0.2, generator=generator)
                if "norm" in key:
                    value.add_(1.0)
                if key.endswith("sinks"):
                    value.fill_(float("-inf"))
                if index and form.shared and "mtp_block" not in key:
                    value.copy_(modules[0].state_dict()[key])
    return modules, rotary, window


def _mimo_v2_config(form: Published, model: Any) -> Any:
    values = form.config
    rope = {
        "rope_type": "default",
        "rope_theta": values["swa_rope_theta"],
        "partial_rotary_factor": values["partial_rotary_factor"],
    }
    sizes: dict[str, Any] = dict(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        intermediate_size=model.config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=values["swa_num_attention_heads"],
        num_key_value_heads=values["swa_num_key_value_heads"] // 2,  # layers with a window have twice as many
        head_dim=values["swa_head_dim"],
        v_head_dim=values["swa_v_head_dim"],
        attention_value_scale=values["attention_value_scale"],
        sliding_window_size=values["sliding_window_size"],
        rms_norm_eps=values["layernorm_epsilon"],
        layer_types=["sliding_attention"],
        mlp_layer_types=["dense"],
        rope_parameters={"sliding_attention": rope, "full_attention": rope},
        attn_implementation="eager",
    )
    return MiMoV2FlashConfig(**sizes)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    old = max((old for old in table if name.startswith(old)), key=len)
    return table[old] + name.removeprefix(old)
