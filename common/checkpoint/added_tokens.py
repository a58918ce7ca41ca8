"""Tells which tokens that tokenizer.json adds to the vocabulary are control tokens, which represent no text."""

from __future__ import annotations


def is_marker(content: str, special: bool) -> bool:
    """Return whether llguidance matches an added token by its id only.

    A token in angle brackets, such as Qwen3's <tool_call>, is matched by its id even if it is not special.
    """
    return special or (content.startswith("<") and content.endswith(">"))
