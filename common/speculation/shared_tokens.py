"""Compares the tokens of a draft that is a language model with those of its target. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.draft_config import DRAFT_REMEDY
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import MAX_TOKENIZER_BYTES
from common.checkpoint.model_files import read_json
from common.errors import ModelError

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_VALUES = 8_000_000  # a vocabulary of 150,000 tokens with its merges has some 800,000


def check_same_tokens(draft: Path, target: Path) -> None:
    """Check that ids below the shorter of two vocabularies are the same tokens; longer ones are padded.

    Vocabularies of one length are not compared. Raises ModelError.
    """
    ours, theirs = ModelConfig.load(draft).vocab_size, ModelConfig.load(target).vocab_size
    if ours == theirs:
        return
    sizes = f"{draft / 'config.json'}: vocab_size is {ours}, the target has {theirs}"
    missing = [path for path in (draft, target) if not (path / TOKENIZER).is_file()]
    if missing:
        raise ModelError(f"{sizes}, and {missing[0]} has no {TOKENIZER} that shows whether ids agree: add it")
    own, other = (tokens_by_id(path / TOKENIZER) for path in (draft, target))
    for index in range(min(ours, theirs)):
        if index in own and index in other and own[index] != other[index]:
            raise ModelError(
                f"{sizes}, and token {index} is {own[index][:40]!r}, the target's is {other[index][:40]!r}: this draft "
                f"is for another model; {DRAFT_REMEDY}"
            )


def tokens_by_id(file: Path) -> Mapping[int, str]:
    """Return id -> token of a tokenizer.json, added tokens included. Raises ModelError."""
    raw = read_json(file, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_VALUES)
    model, added = raw.get("model"), raw.get("added_tokens")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    found: dict[int, str] = {}
    if isinstance(vocab, dict):
        found = {index: token for token, index in vocab.items() if type(index) is int}
    elif isinstance(vocab, list):  # a Unigram model's [token, score]
        found = {
            index: str(entry[0]) for index, entry in enumerate(vocab) if isinstance(entry, list) and entry
        }
    else:
        raise ModelError(f"{file}: model.vocab must be an object or a list, found {type(vocab).__name__}")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str):
            found[entry["id"]] = entry["content"]
    return found
