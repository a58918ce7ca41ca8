"""The modules of multi-token prediction in the form of MiMo-V2: tensors model.mtp.layers.{k}.*, sizes from config.json.

config.json is that of MiMo-V2-Flash. A module has the attention of the target's layers with a window, whose sizes are
the keys `swa_*`, and a dense feed-forward. No key says how many modules there are: the names of the tensors do. All
modules read the target's hidden state before its final norm.

The modules work over any target of their width and vocabulary; MiMo-V2 itself is not served. What its attention has
and tandem does not, sinks and values narrower than keys, is refused by the key that says so.

Sources: python/sglang/srt/models/mimo_v2_flash.py and mimo_v2_flash_nextn.py (SGLang), models/mimo_v2_flash
(transformers).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.checkpoint.families import LLAMA
from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_WIDTH,
    flag,
    number,
    optional_section,
    positive,
    shown,
)
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_tensors
from common.checkpoint.rope_config import parse_rope
from common.errors import ModelError

# SGLang's name for the modules, and the architecture of the file that they are published in.
MIMO_V2 = ("MiMoV2MTP", "MiMoV2FlashForCausalLM")
LISTED = "model.mtp.layers"
WINDOW_THETA = 10_000.0
PARTIAL = "partial_rotary_factor"
_NAME = re.compile(rf"{re.escape(LISTED)}\.(\d{{1,9}})\.")


def mimo_v2_count(directory: Path, most: int) -> int:
    """Return the number of modules in the weights. Raises ModelError if there are none, or more than `most`."""
    numbers = {int(found[1]) for name in read_tensors(directory) if (found := _NAME.match(name))}
    if not numbers:
        raise ModelError(f"{directory}: the weights have no tensors {LISTED}.0.*, so there are no modules")
    if max(numbers) >= most:
        raise ModelError(
            f"{directory}: the weights have a module {LISTED}.{max(numbers)}; at most {most} are supported"
        )
    return max(numbers) + 1


def mimo_v2_layers(raw: Mapping[str, Any], directory: Path, count: int) -> ModelConfig:
    """Return the config of a model whose layers are those of the modules. Raises ModelError."""
    where = str(directory / "config.json")
    _refuse(raw, where)
    head_dim = _width(raw, where)
    own: dict[str, Any] = {
        "architectures": [LLAMA],
        "num_hidden_layers": count,
        "num_attention_heads": positive(raw, "swa_num_attention_heads", where, most=MAX_HEADS),
        "num_key_value_heads": positive(raw, "swa_num_key_value_heads", where, most=MAX_HEADS),
        "head_dim": head_dim,
        "rms_norm_eps": number(raw, "layernorm_epsilon", where, 1e-5, 0.1),
        "rope_theta": number(raw, "swa_rope_theta", where, WINDOW_THETA),
    }
    for key in ("rope_parameters", "rope_scaling"):
        values = optional_section(raw, key, where)
        own[key] = {name: value for name, value in values.items() if name not in ("rope_theta", PARTIAL)}
    plain = {key: value for key, value in raw.items() if key != PARTIAL}  # a Llama rotates whole heads
    model = ModelConfig.parse({**plain, **own}, directory)
    rope = parse_rope({**raw, **own}, model.max_position_embeddings, where, 1.0)
    dims = rope.rotated_dims(head_dim)
    if dims < 2 or dims % 2:
        raise ModelError(
            f"{where}: {PARTIAL} {rope.partial} rotates {dims} of {head_dim} dimensions of a head; an even "
            "number is needed"
        )
    # A query sees its own key and this many keys before it.
    window = positive(raw, "sliding_window_size", where, most=MAX_POSITIONS) + 1
    return replace(
        model,
        rope=rope,
        sliding_windows=(window,) * count,
        output_bias=False,
        value_scale=number(raw, "attention_value_scale", where, 1.0),
    )


def _refuse(raw: Mapping[str, Any], where: str) -> None:
    if flag(raw, "add_swa_attention_sink_bias", where):
        raise ModelError(
            f"{where}: add_swa_attention_sink_bias true is not supported: the attention of these modules would leave "
            "out their sinks; only modules that were trained without sinks can be used"
        )


def _width(raw: Mapping[str, Any], where: str) -> int:
    """Return the width of the keys of a head, which is that of its values too."""
    head_dim = positive(raw, "swa_head_dim", where, most=MAX_WIDTH)
    values = positive(raw, "swa_v_head_dim", where, head_dim, MAX_WIDTH)
    if values != head_dim:
        raise ModelError(
            f"{where}: swa_v_head_dim {shown(values)} is not supported: values are as wide as keys, and swa_head_dim "
            f"is {head_dim}"
        )
    return head_dim
