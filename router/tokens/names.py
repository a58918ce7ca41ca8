"""Names the tokens in log-probabilities: by their text, or by their ids with `return_tokens_as_token_ids`."""

from __future__ import annotations

from typing import Protocol

from router.tokens.tokenizer import Tokenizer


class TokenNames(Protocol):
    """The names of tokens in log-probabilities."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class IdNames:
    """Names tokens by their ids, for tokens whose text is ambiguous; the bytes remain those of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"
