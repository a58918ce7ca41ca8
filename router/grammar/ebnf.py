"""Writes grammars in EBNF, as GBNF of llama.cpp defines it, as grammars in Lark."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    RepetitionNode,
    RuleNode,
    resolve,
)

# An escaped character or the escape of a code point.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def lark_of(ebnf: str) -> str:
    """Return the same grammar in Lark. Raises ValueError, or RecursionError for one that is nested too deep.

    llguidance's own converter loses the parentheses of a repetition that is itself repeated, ("a" {2})*, and the zeros
    of \\u0041.
    """
    try:
        rules: dict[str, RuleNode] = GrammarParser().parse(_ESCAPE.sub(_plain, ebnf))
        resolve(rules)
    except RecursionError:
        raise
    except Exception as error:  # the parser raises plain exceptions of several types
        raise ValueError(f"not a grammar in EBNF: {error}") from error
    in_order = sorted(rules.values(), key=lambda rule: rule.order)
    for rule in in_order:
        _keep_parentheses(rule)
    return "%llguidance {}\n\n" + "".join(f"{rule}\n" for rule in in_order)


def _keep_parentheses(node: ASTNode) -> None:
    """Put repetitions that are repeated into groups of their own, because only groups are written with parentheses."""
    if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
        node.node = AlternativeNode([node.node])
    for child in node.children():
        _keep_parentheses(child)


def _plain(match: re.Match[str]) -> str:
    """Replace the escape of a code point by the character, or by its short escape if it means something itself."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > _LAST_CODE_POINT or code in _SURROGATES:
        raise ValueError(f"{match[0]} is not a character")
    return chr(code) if code >= 0x80 or chr(code).isalnum() else f"\\x{code:02x}"
