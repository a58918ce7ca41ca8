"""Grammars for structured output: the constraint of an answer, and the one grammar that enforces it."""
