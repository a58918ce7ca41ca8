"""Checks the length of prompts, and truncates longer ones by `truncate_prompt_tokens` (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from common.errors import InvalidRequest
from router.requests.checks import check_length
from router.requests.openai_schema import SharedFields, TokenIds

Ids = TypeVar("Ids", list[int], bytes, TokenIds)
TRUNCATE, SIDE = "truncate_prompt_tokens", "truncation_side"


class PromptLength(msgspec.Struct, frozen=True, array_like=True):
    """The length of the prompts of one request."""

    max_model_len: int
    kept: int | None = None  # tokens that are left of a longer prompt; None: it is refused
    first: bool = False  # the first tokens are kept, not the last ones
    min_answer_tokens: int = 1  # for which the prompt leaves room

    def check(self, tokens: int, field: str, exact: bool = True) -> None:
        """Raise ContextTooLong, unless the prompt is cut. If not `exact`, `tokens` is a lower bound."""
        if self.kept is None:
            check_length(tokens, self.max_model_len, field, exact, self.min_answer_tokens)

    def cut(self, ids: Ids, width: int = 1) -> Ids:
        """Return what is kept of a prompt; `width`: items per token."""
        if self.kept is None or len(ids) <= self.kept * width:
            return ids
        return ids[: self.kept * width] if self.first else ids[-self.kept * width :]

    def may_have_cut(self, ids: Sequence[int]) -> bool:
        """Return whether `ids`, as `cut` returned them, may be a part of a longer prompt."""
        return len(ids) == self.kept


def prompt_length(body: SharedFields, max_model_len: int, max_field: str = "max_tokens") -> PromptLength:
    """Return the length that a request asks for. `max_field`: the name under which the client sent max_tokens.

    As in vLLM, the prompt leaves room for `max_tokens`. Raises InvalidRequest with the field.
    """
    if body.truncation_side not in (None, "left", "right"):
        raise InvalidRequest(f"{SIDE} must be left or right", param=SIDE)
    given = body.truncate_prompt_tokens
    if given is None:
        return PromptLength(max_model_len, min_answer_tokens=body.min_answer_tokens)
    asked = getattr(body, max_field)
    most = max_model_len - max(asked or 0, 0)
    if not (1 <= given <= max(most, 1) or given == -1):
        less = f" less {max_field}" if asked else ""
        raise InvalidRequest(
            f"{TRUNCATE} must be -1 for as many tokens as fit, or from 1 to {max(most, 1)}, the length of the "
            f"context{less}",
            param=TRUNCATE,
        )
    # Without max_tokens there is room for the default, but at least for `min_answer_tokens`.
    least = body.min_answer_tokens
    room = max_model_len - max((body.default_tokens if asked is None else asked) or 0, least)
    kept = max(room if given == -1 else min(given, max_model_len - max(asked or 0, least)), 1)
    return PromptLength(max_model_len, kept, body.truncation_side == "right", least)
