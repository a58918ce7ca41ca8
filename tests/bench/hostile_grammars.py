"""How long hostile constraints keep a text worker busy: until they are refused, or compiled.

    python -m tests.bench.hostile_grammars

Processor time of one thread, with the tiny model's tokenizer and with one of 128,256 tokens, one line per constraint of
tests/fakes/hostile_grammars.py, and the worst of either kind. The router refuses them in this process, before a node
hears of them.
"""

from __future__ import annotations

import time

import msgspec

from common.errors import InvalidGrammar, RequestError
from common.grammar import GrammarCompiler
from router.grammar.grammar_text import grammar_text
from router.requests.constraint_fields import ConstraintFields
from router.requests.read_constraint import read_constraint, with_schema_texts
from tests.bench.grammars import constructed_tokenizer
from tests.cluster.harness import MODEL
from tests.fakes.hostile_grammars import HOSTILE, Fields

TOKENS = 128_256


def judge(compiler: GrammarCompiler, fields: Fields) -> str:
    """Return why a constraint is refused, or that it compiles."""
    try:
        constraint = read_constraint(with_schema_texts(msgspec.convert(fields, ConstraintFields)))
        if constraint is None:
            raise InvalidGrammar("no constraint")
        compiler.matcher(grammar_text(constraint))
    except RequestError as error:
        return f"refused: {str(error)[:80]!r}"
    return "compiled"


def main() -> None:
    compilers = (
        GrammarCompiler((MODEL / "tokenizer.json").read_text(), 704, [2]),
        GrammarCompiler(constructed_tokenizer(TOKENS), TOKENS, [TOKENS - 1]),
    )
    for compiler in compilers:
        worst: dict[str, tuple[float, str]] = {}
        for name, fields in HOSTILE.items():
            began = time.thread_time()
            said = judge(compiler, fields)
            milliseconds = 1e3 * (time.thread_time() - began)
            print(f"{compiler.vocab_size:7} {milliseconds:6.1f} ms  {name}: {said}")
            kind = said.partition(":")[0]
            worst[kind] = max(worst.get(kind, (0.0, "")), (milliseconds, name))
        for kind, (milliseconds, name) in worst.items():
            print(f"{compiler.vocab_size:7} {milliseconds:6.1f} ms  worst {kind}: {name}")


if __name__ == "__main__":
    main()
