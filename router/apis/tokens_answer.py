"""Answers of vLLM's /inference/v1/generate: token ids instead of a text, complete or in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from router.answers.answer_form import AnswerForm
from router.answers.details import PromptScoreList
from router.answers.openai_responses import AnswerPiece, ChatFormat, Usage
from router.http.sse import DONE

TOKENS_ID = "generate-tokens-"  # prefix of an answer's id; the request id follows
_encode = msgspec.json.Encoder().encode


class _CollectedTokens:
    """One choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.logprobs: list[bytes] = []
        self.finish_reason: str | None = None


class TokensForm(AnswerForm):
    """An `AnswerForm`, and the collector of its own complete answers."""

    def __init__(
        self, identity: str, form: ChatFormat, scores: PromptScoreList | None, head: dict[str, Any]
    ) -> None:
        """`form` formats the log-probabilities of tokens, `scores` those of the prompt.

        Args:
            identity: the id of the request.
            head: what else a complete answer begins with.
        """
        told = {"request_id": TOKENS_ID + identity}
        self._event = b"data: " + _encode(told)[:-1] + b',"choices":['
        self._whole = _encode(told | head)[:-1] + b',"choices":['
        self._form = form
        self._scores = scores
        self._choices: list[_CollectedTokens] = []

    # -- a stream

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        if not piece.tokens and piece.finish_reason is None:
            return b""
        ids = [token.id for token in piece.tokens]
        shown = self._choice(piece.index, ids, self._form.encoded_logprobs(piece.tokens), piece.finish_reason)
        return b"%b%b]%b}\n\n" % (self._event, shown, usage)

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        counts = b'%b],"usage":%b}\n\n' % (self._event, _encode(usage.report())) if with_usage else b""
        return (counts + DONE,)

    # -- a complete answer

    def collector(self, choices: int) -> TokensForm:
        self._choices = [_CollectedTokens() for _ in range(choices)]
        return self

    def add(self, piece: AnswerPiece) -> None:
        if self._scores is not None and piece.index == 0:
            self._scores.add(piece)
        choice = self._choices[piece.index]
        choice.ids.extend(token.id for token in piece.tokens)
        choice.logprobs += self._form.encoded_logprobs(piece.tokens)
        choice.finish_reason = piece.finish_reason

    async def parts(self, usage: Usage) -> list[bytes]:
        shown = [
            self._choice(index, each.ids.tolist(), each.logprobs, each.finish_reason)
            for index, each in enumerate(self._choices)
        ]
        scores = [b',"prompt_logprobs":null'] if self._scores is None else self._scores.parts()
        return [self._whole, b",".join(shown), b'],"usage":', _encode(usage.report()), *scores, b"}"]

    def _choice(
        self, index: int, ids: Sequence[int], logprobs: Sequence[bytes], finish_reason: str | None
    ) -> bytes:
        listed = b'{"content":[%b]}' % b",".join(logprobs) if self._form.lists_logprobs else b"null"
        return b'{"index":%d,"logprobs":%b,"finish_reason":%b,"token_ids":%b}' % (
            index,
            listed,
            _encode(finish_reason),
            _encode(ids),
        )
