"""Makes the compiler for the tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from common.checkpoint.end_tokens import end_tokens
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import MAX_TOKENIZER_BYTES, read_bytes
from common.errors import ModelError
from common.grammar.compiler import GrammarCompiler


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = msgspec.field(default_factory=dict)


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that gives tokens their ids."""

    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list)
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)


_files = msgspec.json.Decoder(_TokenizerFile)


def has_tokenizer(path: Path) -> bool:
    return (path / "tokenizer.json").is_file()


def compiler_for(path: Path, config: ModelConfig) -> GrammarCompiler:
    """Read tokenizer.json of the directory. Raises ModelError if it is missing or cannot constrain answers."""
    if not has_tokenizer(path):
        raise ModelError(f"{path} has no tokenizer.json, which constrained answers need")
    file = path / "tokenizer.json"
    try:
        text = read_bytes(file, MAX_TOKENIZER_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8: {error}") from error
    return GrammarCompiler(text, config.vocab_size, end_tokens(path, config, _ids(text, file).get))


def _ids(text: str, file: Path) -> dict[str, int]:
    """Return the ids of the tokens of a tokenizer.json. Raises ModelError."""
    try:
        found = _files.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file} cannot constrain answers: {error}") from error
    vocab = found.model.vocab if isinstance(found.model.vocab, dict) else {}
    return vocab | {each.content: each.id for each in found.added_tokens}
