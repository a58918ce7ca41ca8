"""The compiler of a model directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.model_config import ModelConfig
from common.errors import ModelError
from common.grammar.model_tokenizer import compiler_for

MODEL = Path("deploy/tiny_models/tiny-target")


def test_the_compiler_has_the_width_of_the_logits() -> None:
    config = ModelConfig.load(MODEL)
    compiler = compiler_for(MODEL, config)
    assert compiler.vocab_size == config.vocab_size
    assert compiler.tokenize("yes") == compiler.tokenize("yes") != []


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        compiler_for(tmp_path, ModelConfig.load(MODEL))


def test_a_tokenizer_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="is not UTF-8"):
        compiler_for(tmp_path, ModelConfig.load(MODEL))
