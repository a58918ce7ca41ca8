"""The control tokens that tokenizer.json adds to the vocabulary: those that stand for no text."""

from __future__ import annotations


def is_marker(content: str, special: bool) -> bool:
    """Return whether llguidance matches an added token by its id only.

    Tokens in angle brackets are such tokens even if they are not special, such as Qwen3's <tool_call>.
    """
    return special or (content.startswith("<") and content.endswith(">"))
