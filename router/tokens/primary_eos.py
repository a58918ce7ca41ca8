"""The primary end-of-sequence id of a model: the one whose answers have no `stop_reason`, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.checkpoint.tokenizer_config import read_tokenizer_config, special_token
from router.tokens.tokenizer import Tokenizer


def primary_eos(model: Path, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> int | None:
    """Return the id of the tokenizer's `eos_token`, else the first of `eos_ids`. Raises ModelError."""
    text = special_token(read_tokenizer_config(model), "eos_token")
    found = None if text is None else tokenizer.token_to_id(text)
    return next(iter(eos_ids), None) if found is None else found
