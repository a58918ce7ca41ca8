"""The config.json of a language model that is published with parts for other inputs, such as a vision tower. No torch.

The other parts are not loaded: the model serves text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.json_fields import section
from common.checkpoint.rope_config import split_sections

TIED = "tie_word_embeddings"
# Keys that such a file may have outside text_config.
OUTER = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "quantization_config",
    TIED,
    "architectures",
)


def text_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config.json of the language model as a directory of its own would have it. Raises ModelError.

    The sections of its rope are left out: a text has one position per token.
    """
    return split_sections(flat_text(raw, where), where, interleaved=True)[0]


def flat_text(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the language model, which are in text_config, or beside `architectures` in a copy without
    the other parts.
    """
    flat = dict(raw)
    if raw.get("text_config") is not None:
        outer = {key: raw[key] for key in OUTER if raw.get(key) is not None}
        inner = {key: value for key, value in section(raw, "text_config", where).items() if value is not None}
        flat = {**outer, **inner, "architectures": raw["architectures"]}
        # The head is a part of the whole model, so its own value decides, as in transformers.
        if TIED in outer:
            flat[TIED] = outer[TIED]
    return flat
