"""The constraint that an answer must satisfy, before it is compiled."""

from __future__ import annotations

import msgspec

from router.grammar.lark import Lark
from router.grammar.structural_tags import Tags


class JsonSchema(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """JSON that a schema accepts."""

    schema: str  # JSON text
    any_whitespace: bool = True  # False: one layout without any
    whitespace_pattern: str | None = None  # a regular expression for each run of whitespace
    closed: bool = False  # objects have no properties but those that they name


class Regex(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Text that a regular expression matches as a whole."""

    pattern: str


class OneOf(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """One of some texts."""

    options: list[str]


class Ebnf(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A grammar in the EBNF of llama.cpp, which starts at `root`."""

    text: str


Form = JsonSchema | Regex | OneOf | Lark | Ebnf | Tags


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of free text that precedes the constrained part, for example of reasoning."""

    text: str
    # The marker with which the free text begins, if there may be none; None: there always is free text.
    begin: str | None = None
    special: dict[str, int] = {}  # ids of the special tokens in these texts


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The form of an answer, and the field that errors name."""

    field: str
    form: Form
    after: End | None = None  # any text up to and including this comes first
