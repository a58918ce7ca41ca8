"""Makes the compiler for the tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import MAX_TOKENIZER_BYTES, read_bytes
from common.errors import ModelError
from common.grammar.compiler import GrammarCompiler


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
    return GrammarCompiler(text, config.vocab_size, config.eos_token_ids)
