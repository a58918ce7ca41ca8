"""Limits of grammars. The router and both kinds of nodes use the same ones, so what the router accepts compiles."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The limits on the cost of one grammar.

    The time that llguidance needs grows with the square of the number of optional properties and of patternProperties,
    and with the least common multiple of all `multipleOf`; it doubles with each pattern that is intersected with
    others. Its own limits bound none of these, so they are counted before it compiles.
    """

    max_properties: int = 512  # in all schemas of a grammar together
    max_pattern_properties: int = 32  # in all schemas of a grammar together
    max_intersected: int = 12  # patterns, formats and bounds of lengths that the same text has to match
    max_intersected_values: int = 1000  # in an enum that is combined with such a one
    max_ampersands: int = 6  # in a Lark grammar: each may intersect one more pattern
    max_values: int = 20_000  # numbers, texts, lists and objects of all schemas together
    max_depth: int = 64
    max_multiple: int = 4096  # least common multiple of all `multipleOf`, in units of their last decimal
    lexer_fuel: int = 100_000
    step_fuel: int = 100_000  # lexer work for one mask: some 7 ms
    step_items: int = 50_000  # parser work for one mask: some 2.5 ms
    lexer_states: int = 50_000  # 1 to 2 KiB each
    grammar_size: int = 100_000
    deadline_s: float = 5.0  # for a compilation that waits for others; it takes at most some 50 ms itself

    def parser(self) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.grammar_size,
            verbose_errors=False,
        )
