"""Compiles the grammars of a node's requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from common.checkpoint.model_config import ModelConfig
from common.errors import InvalidGrammar, ModelError
from common.grammar.compiler import GrammarCompilation
from common.grammar.model_tokenizer import compiler_for
from common.grammar.token_marker import Symbols, by_id
from common.observability.logs import Log


class Grammars(Protocol):
    """Starts to compile grammars; GrammarCompiler is one."""

    def start(self, grammar: str, now: Callable[[], float], /) -> GrammarCompilation:
        """Compile in a thread. Raises RequestError if too many wait already."""
        ...

    def symbols_of(self, token: int, /) -> Symbols:
        """Return the bytes of a token, or its id for one without any; see `TokenMarker`."""
        ...


class NoGrammars:
    """Refuses every grammar, for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self, grammar: str, now: Callable[[], float], /) -> GrammarCompilation:
        raise InvalidGrammar(f"this cluster cannot constrain answers: {self._reason}")

    def symbols_of(self, token: int, /) -> Symbols:
        return by_id(token)


NO_GRAMMARS = NoGrammars("this model has no tokenizer.json")


def grammars_for(path: Path, config: ModelConfig, log: Log) -> Grammars:
    """Return what compiles grammars. A model whose tokenizer it cannot read still serves other requests.

    Its thread runs already: if it could not start later, that would end the main loop. Raises RuntimeError if it cannot
    start.
    """
    try:
        compiler = compiler_for(path, config)
    except ModelError as error:
        log.warning("constrained answers are refused", reason=str(error))
        return NoGrammars(str(error))
    compiler.begin()
    return compiler
