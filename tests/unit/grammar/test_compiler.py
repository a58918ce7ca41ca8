"""Compiling grammars: what is refused, with which words; the cache; the thread."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
from llguidance import LLMatcher

from common.errors import InvalidGrammar, ModelError, Overloaded
from common.grammar import GrammarCompilation, GrammarCompiler, Matcher, mask_width
from common.grammar import compiler as compiler_module
from common.messages.generation import MAX_GRAMMAR
from tests.fakes.waiting import PATIENCE

TOKENIZER = Path("deploy/tiny_models/tiny-target/tokenizer.json").read_text()
COMPILER = GrammarCompiler(TOKENIZER, 704, [2])


def _schema(schema: Any) -> str:
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return grammar


def matcher_of(pending: GrammarCompilation) -> Matcher:
    """Wait for the compiler's thread."""
    end = time.monotonic() + PATIENCE
    while not pending.ready(0.0):
        assert time.monotonic() < end
        time.sleep(0.001)
    return pending.matcher()


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "cannot be compiled"),
        ("nonsense", "cannot be compiled"),
        ("{}", "cannot be read"),
        ('{"grammars": [], "max_tokens": 5}', "cannot be read"),
        (_schema({"type": "strin"}), "Invalid type: strin"),
        (LLMatcher.grammar_from_lark("start: foo"), "unknown name"),
        (LLMatcher.grammar_from_lark('start: %json {"type": "string"}'), "%json is not supported"),
        (LLMatcher.grammar_from_regex("a("), "unclosed group"),
        (LLMatcher.grammar_from_regex("(?=a)b"), "look-around"),
        (
            _schema({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}),
            "over 512 properties",
        ),
        (_schema({"enum": [str(i) for i in range(30_000)]}), "characters"),
        (_schema({"enum": list(range(25_000))}), "characters"),
        (_schema({"enum": [0] * 25_000}), "over 20000 values"),
        (_schema(_nested(60)), "nested over"),
        ('{"grammars":[{"json_schema":' + "[" * 5000 + "]" * 5000 + "}]}", "nested over"),
        (_schema({"type": "integer", "multipleOf": 999_983}), "least common multiple"),
        (_schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}), "least common multiple"),
        (_schema({"type": "number", "multipleOf": 1e300}), "multipleOf"),
        (_schema({"type": "number", "multipleOf": 0}), "multipleOf"),
        ('{"grammars":[{"json_schema":{"multipleOf":1e999}}]}', "multipleOf|out of range"),
        (_schema({"$ref": "https://example.com/schema.json"}), "cannot be compiled"),
        (_schema({"$ref": "#"}), "refers to itself"),
        ('start: x\nx: x "a"', "cannot be compiled"),
        ("x" * (MAX_GRAMMAR + 1), "limit is"),
    ],
)
def test_refusals_name_the_reason(grammar: str, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        COMPILER.matcher(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}},
        {"type": "number", "multipleOf": 0.01},
        {"type": "array", "items": {"type": "integer", "multipleOf": 5}},
        {"enum": ["a", 1, None, {"b": [1]}]},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        _nested(20),
    ],
)
def test_ordinary_schemas_compile(schema: Any) -> None:
    assert COMPILER.matcher(_schema(schema)).failure is None


def test_matchers_of_one_text_are_independent() -> None:
    grammar = LLMatcher.grammar_from_regex("ab")
    first, second = COMPILER.matcher(grammar), COMPILER.matcher(grammar)
    assert first.accept(COMPILER.tokenize("a"))
    assert second.accept(COMPILER.tokenize("a"))
    assert second.accept(COMPILER.tokenize("b"))
    assert second.stopped
    assert not first.stopped


class PanicException(BaseException):
    """Stands for the one of PyO3, which cannot be imported."""


@pytest.mark.parametrize("where", ["LLMatcher", "fill_next_token_bitmask"])
def test_a_grammar_at_which_the_library_panics_is_refused_and_others_compile(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception is none that the main loop of a node expects."""

    def panic(*_: object, **__: object) -> Never:
        raise PanicException("index out of bounds")

    compiler = GrammarCompiler(TOKENIZER, 704, [2])
    bad, good = LLMatcher.grammar_from_regex("ab"), LLMatcher.grammar_from_regex("cd")
    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, where, panic)
        pending = compiler.start(bad)
        with pytest.raises(InvalidGrammar, match="the grammar cannot be compiled: index out of bounds"):
            matcher_of(pending)
    matcher_of(compiler.start(good))
    with pytest.raises(InvalidGrammar, match="index out of bounds"):
        compiler.matcher(bad)
    compiler.close()


def test_a_text_is_compiled_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, 704, [2])
    good, bad = LLMatcher.grammar_from_regex("ab"), LLMatcher.grammar_from_regex("a(")
    for _ in range(3):
        compiler.matcher(good)
        with pytest.raises(InvalidGrammar):
            compiler.matcher(bad)
    assert compiler.compiled == 2
    for number in range(256):
        with pytest.raises(InvalidGrammar):
            compiler.matcher(f"{number}")
    compiler.matcher(good)
    assert compiler.compiled == 2 + 256 + 1, "the cache is bounded"


def test_the_thread_compiles_and_refuses() -> None:
    compiler = GrammarCompiler(TOKENIZER, 704, [2])
    good = compiler.start(LLMatcher.grammar_from_regex("ab"))
    bad = compiler.start(LLMatcher.grammar_from_regex("a("))
    assert matcher_of(good).accept(compiler.tokenize("a"))
    with pytest.raises(InvalidGrammar):
        matcher_of(bad)
    compiler.close()


def test_a_compilation_ends_at_its_deadline() -> None:
    waiting = GrammarCompilation(Future(), deadline=10.0)
    assert not waiting.ready(9.0)
    assert waiting.ready(10.0)
    with pytest.raises(Overloaded):
        waiting.matcher()


def test_a_tokenizer_that_cannot_be_read_is_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="cannot constrain answers"):
        GrammarCompiler("{}", 704, [2])

    def panic(*_: object, **__: object) -> Never:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(compiler_module, "LLTokenizer", panic)
    with pytest.raises(ModelError, match="cannot constrain answers: index out of bounds"):
        GrammarCompiler(TOKENIZER, 704, [2])


@pytest.mark.parametrize("model", ["tiny-target", "tiny-tools", "tiny-vision"])
def test_the_text_of_a_marker_is_text(model: str) -> None:
    """A special token's name in a literal is neither demanded nor drafted as that token, which the grammar forbids."""
    raw = json.loads((Path("deploy/tiny_models") / model / "tokenizer.json").read_text())
    markers = {token["content"]: token["id"] for token in raw["added_tokens"]}
    assert markers
    compiler = GrammarCompiler(json.dumps(raw), len(raw["model"]["vocab"]), [2])
    for name, token in markers.items():
        text = f"x{name}y"
        for grammar in (_schema({"const": text}), LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}")):
            matcher = compiler.matcher(grammar)
            forced = matcher.forced(100)
            assert token not in forced
            masks = np.zeros((1, mask_width(compiler.vocab_size)), dtype=np.int32)
            steps = 0
            while not matcher.stopped:
                matcher.fill(masks, 0)
                allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
                assert allowed.size
                assert token not in allowed
                assert matcher.accept([int(allowed[0])]), name
                steps += 1
            assert steps > len(name) / 4
        named = compiler.matcher(LLMatcher.grammar_from_lark(f'start: <[{token}]> "y"'))
        assert named.accept([token]) is (token != 2)
        free = compiler.matcher(LLMatcher.grammar_from_lark("start: /(?s:.*)/"))
        assert free.accept([token]) is (token == 2), "a marker is no text, and the end token ends it"
