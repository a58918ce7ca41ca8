"""Hides the names of special tokens and markers from llguidance.

A grammar matches such a token by its id only, but llguidance tokenizes the text that a grammar forces as any text, in
which it finds the names of these tokens. It then drafts, and even demands, a token that the grammar forbids. So its
tokenizer gets names that occur in no text.
"""

from __future__ import annotations

import json
from typing import Any

from common.checkpoint.added_tokens import is_marker


def hide_markers(tokenizer_json: str, vocab_size: int) -> str:
    """Return tokenizer.json with other names for markers. Their ids, and all other tokens, stay as they are.

    Added tokens past the model's vocabulary are left out: no answer has them. Raises ValueError, KeyError, TypeError or
    AttributeError for a file that is not a tokenizer.
    """
    raw = json.loads(tokenizer_json)
    renamed: dict[str, str] = {}
    added = raw.get("added_tokens") or []
    raw["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    left_out = {token["content"] for token in added if token["id"] >= vocab_size}
    for token in raw["added_tokens"]:
        if is_marker(token["content"], token["special"]):
            # A noncharacter of Unicode, which exchanged text never contains; the brackets mark what is not text.
            renamed[token["content"]] = token["content"] = f"<\U0010fffe{token['id']}>"
    model = raw["model"]
    model["vocab"] = _renamed(model["vocab"], renamed, left_out)
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(raw, ensure_ascii=False)


def _renamed(vocabulary: Any, renamed: dict[str, str], left_out: set[str]) -> Any:
    """Rename or leave out entries of {token: id}, or of [[token, score]] as of Unigram models."""
    if isinstance(vocabulary, dict):
        kept = ((token, token_id) for token, token_id in vocabulary.items() if token not in left_out)
        return {renamed.get(token, token): token_id for token, token_id in kept}
    return [[renamed.get(token, token), *score] for token, *score in vocabulary if token not in left_out]
