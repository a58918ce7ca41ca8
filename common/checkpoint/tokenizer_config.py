"""tokenizer_config.json of a model directory, which a model may lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoint.model_directory import MAX_TOKENIZER_CONFIG_BYTES
from common.checkpoint.model_files import read_json


def read_tokenizer_config(model: Path) -> dict[str, Any]:
    """Return the settings; none without the file. Raises ModelError."""
    file = model / "tokenizer_config.json"
    return read_json(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Return the text of a special token such as `eos_token`, which is a string or an object with `content`."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
