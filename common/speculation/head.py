"""Reads config.json of an EAGLE head: one decoder layer that continues the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.checkpoint.draft_config import check_same
from common.checkpoint.families import LLAMA
from common.checkpoint.json_fields import MAX_WIDTH, positive
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rope_config import SECTIONS, split_sections, with_sections
from common.errors import ModelError
from common.speculation.algorithm import Json


def head_model(raw: Json, file: Path, target: ModelConfig) -> tuple[ModelConfig, int]:
    """Return the shapes of the head's layer, and the width of the target state that it reads.

    Raises ModelError if positions, vocabulary or widths differ from the target's.
    """
    plain, sections = split_sections(dict(raw), str(file))
    model = ModelConfig.parse({**plain, "architectures": [LLAMA]}, file.parent)
    model = replace(model, rope=with_sections(model.rope, sections, model.head_dim, str(file)))
    if sections != target.rope.sections:
        raise ModelError(
            f"{file}: {SECTIONS} is {list(sections) or 'not set'}, the target has "
            f"{list(target.rope.sections) or 'none'}: a draft uses the positions of its target"
        )
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    check_same(file, "target_hidden_size", width, target.hidden_size)
    return model, width
