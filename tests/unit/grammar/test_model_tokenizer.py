"""The compiler of a model directory."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher

from common.checkpoint.model_config import ModelConfig
from common.errors import ModelError
from common.grammar.grammars import grammars_for
from common.grammar.model_tokenizer import compiler_for
from common.grammar.token_marker import by_id
from common.observability.logs import Log
from router.tokens.tokenizer import Tokenizer
from tests.fakes.no_threads import allow_no_threads
from tests.fakes.waiting import until

MODEL = Path("deploy/tiny_models/tiny-target")


def test_the_compiler_has_the_width_of_the_logits() -> None:
    config = ModelConfig.load(MODEL)
    compiler = compiler_for(MODEL, config)
    assert compiler.vocab_size == config.vocab_size
    assert compiler.tokenize("yes") == compiler.tokenize("yes") != []


@pytest.mark.parametrize("name", ["tiny-target", "tiny-tools"])
def test_routers_and_nodes_agree_about_the_bytes_of_tokens(name: str) -> None:
    path = MODEL.parent / name
    compiler, tokenizer = compiler_for(path, ModelConfig.load(path)), Tokenizer(path)
    tokens = range(compiler.vocab_size)
    differ = [token for token in tokens if compiler.symbols_of(token) != tokenizer.symbols_of(token)]
    assert [tokenizer.token_bytes(token) for token in differ] == [b"\xff"], "a byte that no text has"
    special = {token for token in tokens if compiler.symbols_of(token) == by_id(token)}
    assert special - {*differ} == {*tokenizer.markers_in((path / "tokenizer.json").read_text()).values()}
    assert compiler.symbols_of(compiler.vocab_size) == by_id(compiler.vocab_size)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        compiler_for(tmp_path, ModelConfig.load(MODEL))


def test_a_tokenizer_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="is not UTF-8"):
        compiler_for(tmp_path, ModelConfig.load(MODEL))


def test_a_constrained_answer_may_end_with_the_token_of_the_tokenizer(tmp_path: Path) -> None:
    """It ends a text, too, where the model names other tokens for that."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    compiler = compiler_for(tmp_path, replace(ModelConfig.load(MODEL), eos_token_ids=(1,)))
    matcher = compiler.matcher(LLMatcher.grammar_from_regex("ab?"))
    assert matcher.accept(compiler.tokenize("a"))
    assert matcher.end_token == 2
    for token in (2, 1):
        other = matcher.fork()
        assert other.accept([token])
        assert other.ended


def test_added_tokens_past_the_vocabulary_of_the_model_constrain_nothing(tmp_path: Path) -> None:
    """Gemma 3's tokenizer has a token for images, for which its text model has no embedding."""
    raw = json.loads((MODEL / "tokenizer.json").read_text())
    config = ModelConfig.load(MODEL)
    last, flags = config.vocab_size, dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw["added_tokens"].append({"id": last, "content": "<picture>", "special": True, **flags})
    raw["model"]["vocab"]["<picture>"] = last
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    compiler = compiler_for(tmp_path, config)
    assert compiler.tokenize("yes") == compiler_for(MODEL, config).tokenize("yes")


def test_grammars_are_compiled_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread starts with the node: a failure while it serves would end its main loop."""
    grammars = grammars_for(MODEL, ModelConfig.load(MODEL), Log("test"))
    allow_no_threads(monkeypatch)
    started = grammars.start(LLMatcher.grammar_from_regex("ab"), time.monotonic)
    until(lambda: started.ready(0.0))
    assert started.matcher().failure is None
