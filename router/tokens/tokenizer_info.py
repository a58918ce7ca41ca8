"""The answer of /tokenizer_info: the model's tokenizer settings and its chat template, as vLLM gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from common.checkpoint.chat_template_file import find_chat_template
from common.checkpoint.tokenizer_config import read_tokenizer_config

MAX_BYTES = 1 << 20  # per answer; its largest fields are left out beyond that
UNKNOWN_CLASS = "PreTrainedTokenizerFast"  # for a model whose tokenizer_config.json names none
# Fields that may name files on this host.
_PATHS = frozenset(("name_or_path", "auto_map"))


def tokenizer_info(model: Path, template: Path | None) -> bytes:
    """Encode the answer; `template` is a file that replaces the model's own template. Raises ModelError."""
    given = read_tokenizer_config(model)
    fields: dict[str, Any] = {
        name: value for name, value in given.items() if name not in _PATHS and not name.endswith("_file")
    }
    fields.setdefault("tokenizer_class", UNKNOWN_CLASS)
    source = find_chat_template(model, template)
    fields["chat_template"] = None if source is None else source.text
    return _within(fields, MAX_BYTES)


def _within(fields: dict[str, Any], most: int) -> bytes:
    """Encode as many fields as fit in `most` bytes, smaller ones first, in their original order."""
    encoded = {name: msgspec.json.encode({name: value})[1:-1] for name, value in fields.items()}
    left, kept = most, set[str]()
    for name in sorted(encoded, key=lambda each: len(encoded[each])):
        left -= len(encoded[name]) + 1
        if left < 1:
            break
        kept.add(name)
    return b"{" + b",".join(field for name, field in encoded.items() if name in kept) + b"}"
