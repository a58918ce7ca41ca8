"""Reads config.json of an EAGLE head: one decoder layer that continues the target's hidden states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from common.checkpoint.draft_config import check_same
from common.checkpoint.families import LLAMA
from common.checkpoint.json_fields import MAX_WIDTH, flag, positive, shown
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rope_config import INTERLEAVED, SECTIONS, is_interleaved, split_sections, with_sections
from common.errors import ModelError
from common.speculation.algorithm import Json
from common.speculation.head_tensors import tensor_names


def head_model(raw: Json, file: Path, target: ModelConfig) -> tuple[ModelConfig, int]:
    """Return the shapes of the head's layer, and the width of the target state that it reads.

    The layers are Llama's, with the biases and the norms of queries and keys for which the checkpoint has tensors, and
    with windows. A head that was trained on text has one position axis: over a target that rotates only a part of a
    head, whose sections it cannot have, it reads the temporal one. Raises ModelError if positions, vocabulary or widths
    differ from the target's.
    """
    plain, sections = split_sections(dict(raw), str(file), interleaved=True)
    interleaved = is_interleaved(raw, str(file))
    model = ModelConfig.parse({**plain, "architectures": [LLAMA]}, file.parent)
    names = tensor_names(file.parent)
    rope = with_sections(model.rope, sections, model.head_dim, str(file), interleaved)
    if not sections and target.rope.sections and target.rope.partial < 1:
        rope = replace(rope, sections=(model.head_dim // 2, 0, 0))
    model = replace(
        model,
        rope=rope,
        qk_norm=_some_end_with("self_attn.q_norm.weight", names),
        qkv_bias=_some_end_with("self_attn.q_proj.bias", names),
        output_bias=_some_end_with("self_attn.o_proj.bias", names),
        mlp_bias=_some_end_with("mlp.down_proj.bias", names),
        sliding_windows=_windows(raw, model.num_layers, str(file)),
    )
    check_positions(file, model, target)
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    check_same(file, "target_hidden_size", width, target.hidden_size)
    return model, width


def check_positions(file: Path, draft: ModelConfig, target: ModelConfig) -> None:
    """Raise ModelError if the draft's rotary embedding has other axes than the target's.

    A draft may also use only the temporal one.
    """
    ours, theirs = draft.rope.sections, target.rope.sections
    if theirs and ours[1:] == (0, 0):
        return
    if ours != theirs:
        raise ModelError(
            f"{file}: {SECTIONS} is {list(ours) or 'not set'}, the target has {list(theirs) or 'none'}: a draft uses "
            "the positions of its target"
        )
    if draft.rope.interleaved != target.rope.interleaved:
        raise ModelError(
            f"{file}: {INTERLEAVED} is {draft.rope.interleaved}, the target has {target.rope.interleaved}: write the "
            "target's value, a draft uses the positions of its target"
        )


def _some_end_with(suffix: str, names: Collection[str]) -> bool:
    return any(name.endswith(suffix) for name in names)


def _windows(raw: Json, layers: int, where: str) -> tuple[int | None, ...]:
    """Return the number of keys that a query of each layer sees, itself included; None: all.

    `layer_types` decides if the file has it, else `use_sliding_window`; a `sliding_window` without them is for all
    layers, as in Mistral's files.
    """
    value = raw.get("sliding_window")
    if value is None:
        return (None,) * layers
    window = positive(raw, "sliding_window", where)
    types = raw.get("layer_types")
    if types is None:
        return (window if flag(raw, "use_sliding_window", where, True) else None,) * layers
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or not all(isinstance(kind, str) and kind in known for kind in types):
        raise ModelError(f"{where}: layer_types must name {', '.join(known)}, found {shown(types)}")
    if len(set(types)) == 1:  # the target's list, often copied
        types = types[:1] * layers
    if len(types) != layers:
        raise ModelError(
            f"{where}: layer_types names {len(types)} layers, the head has {layers}; write one type for each"
        )
    return tuple(known[kind] for kind in types)
