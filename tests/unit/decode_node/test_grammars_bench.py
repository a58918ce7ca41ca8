"""The benchmark of grammars on a CPU: constrained steps of the tiny model, and a constructed tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from llguidance import LLMatcher

from common.grammar import GrammarCompiler
from common.speculation.forced_widths import DRAFTED_WIDTHS, PLAIN_WIDTHS
from tests.bench import grammars, shapes
from tests.bench.drafted_engine import Engine

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"


def test_forced_tokens_give_several_tokens_per_step() -> None:
    target = MODELS / "tiny-target"
    pair = shapes.loaded(target, MODELS / "tiny-eagle3", PLAIN_WIDTHS[0], torch.device("cpu"))
    tokenizer, ends = (target / "tokenizer.json").read_text(), pair.model.config.eos_token_ids
    compiler = GrammarCompiler(tokenizer, pair.model.config.vocab_size, ends)
    engine = Engine(pair, 2, 384, PLAIN_WIDTHS[0], slots=DRAFTED_WIDTHS[0] + 1)
    plain = grammars.Bench(engine, engine.step("none", constrains=True), compiler, 20).plain(2, 12)
    assert plain.tokens_per_step > 1.5
    assert plain.batch == 2
    drafted = grammars.Bench(engine, engine.step("eagle3", constrains=True), compiler, 20).drafted(2, 12)
    assert drafted.json_tokens_per_step > 1.5
    assert drafted.free_tokens_per_step > 1.0


def test_the_constructed_tokenizer_constrains() -> None:
    compiler = GrammarCompiler(grammars.constructed_tokenizer(600), 600, [599])
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(grammars.SCHEMA))
    matcher = compiler.matcher(grammar)
    assert matcher.accept(compiler.tokenize('[{"product_name":"ab'))
    assert not matcher.stopped
