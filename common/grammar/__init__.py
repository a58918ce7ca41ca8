"""Constrained generation by llguidance: compiles a request's grammar and says which tokens it allows next. No torch."""

from common.grammar.compiler import GrammarCompilation, GrammarCompiler
from common.grammar.limits import GrammarLimits
from common.grammar.matcher import Matcher, mask_width

__all__ = ["GrammarCompilation", "GrammarCompiler", "GrammarLimits", "Matcher", "mask_width"]
