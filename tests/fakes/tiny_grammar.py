"""A tokenizer for the 64 tokens of the tiny model, and grammars over it."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from common.grammar import GrammarCompilation, GrammarCompiler, Matcher, mask_width
from common.grammar.token_marker import Symbols
from common.grammar.token_rules import RuleFollower
from tests.fakes.waiting import until

VOCAB = 64
EOS = 0
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_'
PIECES = (
    "na",
    "nam",
    "name",
    "tr",
    "ue",
    "true",
    "al",
    "fal",
    "se",
    "false",
    '":',
    ',"',
    '{"',
    "ag",
    "age",
    "}]",
)
TOKENS = ("<eos>", *CHARACTERS, *PIECES)
assert len(TOKENS) == VOCAB - 1, len(TOKENS)

# The first token may be almost any: one to five characters, then a dash, then what the grammar is about.
BEGIN = '[a-z0-9{}\\[\\]":,._]{1,5}-'


def _merges() -> list[list[str]]:
    known = set(CHARACTERS)
    merges = []
    for piece in PIECES:
        cut = next(at for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= known)
        merges.append([piece[:cut], piece[cut:]])
        known.add(piece)
    return merges


def byte_level_json(tokens: Sequence[str], merges: Sequence[Sequence[str]], end: tuple[int, str]) -> str:
    """Return the text of a tokenizer.json: BPE over bytes, and a special token (id, text) that ends texts."""
    special = {"id": end[0], "content": end[1], "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{**special, "normalized": False, "special": True}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


@functools.cache
def tokenizer_json() -> str:
    """Return the text of a tokenizer.json of which only CHARACTERS have tokens."""
    return byte_level_json(TOKENS, _merges(), (EOS, "<eos>"))


class TinyCompiler(GrammarCompiler):
    """Returns from `start` when its thread has compiled the grammar.

    A NodeCluster counts the turns in which its nodes wait, which says nothing about how late a thread runs.
    """

    def start(self, grammar: str, now: Callable[[], float] = time.monotonic) -> GrammarCompilation:
        made = super().start(grammar, now)
        until(lambda: made.ready(-math.inf))
        return made


@functools.cache
def tiny_compiler() -> TinyCompiler:
    return TinyCompiler(tokenizer_json(), VOCAB, [EOS])


def regex(pattern: str) -> str:
    """Return the text of a grammar for SamplingParams."""
    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def matcher(grammar: str) -> Matcher:
    return tiny_compiler().matcher(grammar)


def allowed_tokens(masks: np.ndarray[tuple[int, ...], np.dtype[np.int32]], row: int) -> set[int]:
    """Return the tokens that a row of masks allows."""
    return {token for token in range(VOCAB) if int(masks[row, token // 32]) >> (token % 32) & 1}


def next_tokens(follower: RuleFollower) -> set[int]:
    """Return the tokens that may come next."""
    masks = np.zeros((1, mask_width(VOCAB)), dtype=np.int32)
    follower.fill(masks, 0)
    return allowed_tokens(masks, 0)


def decoded(tokens: list[int]) -> str:
    return "".join(TOKENS[token] if token < len(TOKENS) else "?" for token in tokens if token != EOS)


NUMBERS = regex(BEGIN + r"\[([0-9]{1,3},){3,8}[0-9]{1,3}\]")
RECORD = regex(
    BEGIN
    + r'\{"name":"[a-z]{1,9}","age":[0-9]{1,3},"false":(true|false),"tags":\[("[a-z]{1,5}",){2}"[a-z]"\]\}'
)
WORDS = regex(BEGIN + r"([a-z]{1,8}_){2,40}[a-z]{1,8}")
GRAMMARS = {"numbers": NUMBERS, "record": RECORD, "words": WORDS}


class HeldCompiler:
    """A compiler whose results count as unfinished until `released`."""

    def __init__(self) -> None:
        self.released = False

    def start(self, grammar: str, now: Callable[[], float]) -> GrammarCompilation:
        return HeldCompilation(self, matcher(grammar), now() + 1e9)

    def symbols_of(self, token: int, /) -> Symbols:
        return tiny_compiler().symbols_of(token)


class HeldCompilation(GrammarCompilation):
    """A compilation of a HeldCompiler."""

    def __init__(self, compiler: HeldCompiler, made: Matcher, deadline: float) -> None:
        done: Future[Matcher] = Future()
        done.set_result(made)
        super().__init__(done, deadline)
        self._compiler = compiler

    def ready(self, now: float) -> bool:
        return self._compiler.released and super().ready(now)
