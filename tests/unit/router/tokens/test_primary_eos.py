"""Which end-of-sequence id of a model is the primary one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.tokens.primary_eos import primary_eos
from router.tokens.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "<|end|>"}, 2),
        ({"eos_token": {"content": "<|end|>", "special": True}}, 2),
        ({"eos_token": "no such token"}, 5),
        ({"eos_token": None}, 5),
        ({}, 5),
        (None, 5),
    ],
)
def test_the_token_of_the_tokenizer_comes_first(
    config: dict[str, Any] | None, expected: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert primary_eos(tmp_path, tokenizer, (5, 2)) == expected


def test_a_model_without_any(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert primary_eos(tmp_path, tokenizer, ()) is None
