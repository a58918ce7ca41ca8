"""Which tokens end the texts of a model, and which of them is the primary one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.end_tokens import end_tokens
from common.checkpoint.model_config import ModelConfig
from tests.cluster.harness import MODEL

IDS = {"<|end|>": 2, "<image>": 704}


@pytest.mark.parametrize(
    ("config", "ids", "expected"),
    [
        ({"eos_token": "<|end|>"}, (5, 2), (2, 5)),
        ({"eos_token": "<|end|>"}, (5, 7), (2, 5, 7)),
        ({"eos_token": "<|end|>"}, (), (2,)),
        ({"eos_token": {"content": "<|end|>", "special": True}}, (5,), (2, 5)),
        ({"eos_token": "no such token"}, (5, 2), (5, 2)),
        ({"eos_token": "<image>"}, (5, 2), (5, 2)),
        ({"eos_token": None}, (5, 2), (5, 2)),
        ({}, (), ()),
        (None, (5, 2), (5, 2)),
    ],
)
def test_the_token_of_the_tokenizer_comes_first_and_always_ends_a_text(
    config: dict[str, Any] | None, ids: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = replace(ModelConfig.load(MODEL), eos_token_ids=ids)
    assert model.vocab_size == 704
    assert end_tokens(tmp_path, model, IDS.get) == expected


def test_the_token_may_be_in_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 5}))
    model = replace(ModelConfig.load(MODEL), eos_token_ids=())
    assert end_tokens(tmp_path, model, IDS.get) == (2,)
