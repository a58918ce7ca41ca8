"""tokenizer_config.json of a model directory, which a model may lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoint.json_fields import Raw
from common.checkpoint.model_directory import MAX_TOKENIZER_CONFIG_BYTES
from common.checkpoint.model_files import read_json

SUFFIX = "_token"  # of the names of special tokens, such as eos_token and image_token
ADDED = "added_tokens_decoder"  # id -> token
EXTRA = ("extra_special_tokens", "additional_special_tokens")


def read_tokenizer_config(model: Path) -> dict[str, Any]:
    """Return the settings; none without the file. Raises ModelError.

    Older models have their special tokens in special_tokens_map.json, which transformers reads unless the settings list
    the added tokens.
    """
    file, older = model / "tokenizer_config.json", model / "special_tokens_map.json"
    found = read_json(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}
    if ADDED not in found and older.is_file():
        tokens = read_json(older, MAX_TOKENIZER_CONFIG_BYTES)
        found |= {name: value for name, value in tokens.items() if name.endswith(SUFFIX) or name in EXTRA}
    return found


def special_token(config: Raw, name: str) -> str | None:
    """Return the text of a special token such as `eos_token`, which is a string or an object with `content`."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def named_tokens(config: Raw) -> dict[str, str]:
    """Return the texts of the special tokens that have a name, under which a chat template may print them."""
    extra = config.get(EXTRA[0])
    own = {name: value for name, value in config.items() if name.endswith(SUFFIX)}
    every = {**own, **extra} if isinstance(extra, dict) else own
    texts = {name: special_token(every, name) for name in every}
    return {name: text for name, text in texts.items() if text}


def listed_tokens(config: Raw) -> list[str]:
    """Return the texts of the special tokens that have no name."""
    found = [each for key in EXTRA if isinstance(each := config.get(key), list)]
    texts = [special_token({"": each}, "") for each in (found[0] if found else [])]
    return [text for text in texts if text]
