"""Compiles constraints in a text worker, so that requests with a grammar that nodes would refuse end there."""

from __future__ import annotations

from msgspec.structs import replace

from common.errors import InvalidGrammar, ModelError
from common.grammar import GrammarCompiler
from router.grammar.constraint import Constraint
from router.grammar.grammar_text import grammar_text
from router.grammar.lark import Lark
from router.grammar.structural_tags import Tags
from router.tokens.tokenizer import Tokenizer


class GrammarWork:
    """The compiler of one worker, made for the first constraint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compilers: dict[tuple[int, tuple[int, ...]], GrammarCompiler] = {}  # one in practice

    def prepare(self, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Make the compiler, which takes some 0.7 s for 128,000 tokens. Raises InvalidGrammar."""
        if (vocab_size, eos_ids) not in self._compilers:
            try:
                compiler = GrammarCompiler(self._tokenizer.json(), vocab_size, eos_ids)
            except ModelError as error:
                raise InvalidGrammar(f"answers of this model cannot be constrained: {error}") from error
            self._compilers[vocab_size, eos_ids] = compiler

    def compile(self, constraint: Constraint, vocab_size: int, eos_ids: tuple[int, ...]) -> str:
        """Return the grammar of a constraint, which compiles. Raises InvalidGrammar with the field."""
        match constraint.form:
            case Tags() as form:
                special = self._tokenizer.markers_in(form.markers)
            case Lark() as form:
                special = self._tokenizer.markers_in(form.text)
            case _:
                special = {}
        text = grammar_text(constraint, special)
        compiler = self._compilers[vocab_size, eos_ids]
        try:
            if constraint.after is not None:
                # What fails at its first token would otherwise fail after the reasoning.
                compiler.matcher(grammar_text(replace(constraint, after=None), special))
            compiler.matcher(text)
        except InvalidGrammar as error:
            raise InvalidGrammar(f"{constraint.field}: {error}", param=constraint.field) from error
        return text
