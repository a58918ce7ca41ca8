"""The tokens that end the texts of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.tokenizer_config import read_tokenizer_config, special_token


def end_tokens(model: Path, config: ModelConfig, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of the tokenizer's `eos_token`, if it has one, and of `config`, as in vLLM. Raises ModelError.

    The first one is the primary one, whose answers have no `stop_reason`. `id_of` looks a token of the tokenizer up.
    """
    text = special_token(read_tokenizer_config(model), "eos_token")
    found = None if text is None else id_of(text)
    if found is None or not 0 <= found < config.vocab_size:
        return config.eos_token_ids
    return tuple(dict.fromkeys((found, *config.eos_token_ids)))
