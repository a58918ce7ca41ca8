"""The parts of its prompt that an answer shows: the text and tokens of `echo`, and `prompt_logprobs`.

They precede the first piece of the answer, as pieces of a bounded number of tokens, between which other requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from common.messages.generation import FINISH_LENGTH, OutputToken, TokenLogprob
from router.answers.openai_responses import AnswerPiece, CompletionFormat
from router.tokens.tokenizer import Tokenizer

PIECE = 128  # tokens formatted in one turn of the event loop


class PromptPiece(AnswerPiece):
    """A part of the prompt. Its first token has no log-probability."""

    first: bool = False  # it begins with the first token of the prompt


class PromptOnly:
    """Stands for the text of an answer without tokens: `echo` with max_tokens 0. See TextStream."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.matched_stop: str | int | None = None

    def push(
        self, tokens: Sequence[OutputToken], finish_reason: str | None
    ) -> tuple[str, Sequence[OutputToken]]:
        """Drop the tokens. The answer ends with the first ones."""
        if tokens or finish_reason is not None:
            self.finish_reason = finish_reason if finish_reason and not tokens else FINISH_LENGTH
        return "", ()


class ShownPrompt:
    """The parts of one prompt that the answer shows."""

    def __init__(
        self, ids: Sequence[int], text: str = "", offsets: Sequence[int] = (), echo: bool = False
    ) -> None:
        """`offsets`: per token, the characters of `text` that precede it."""
        self._ids = ids
        self._text = text
        self._offsets = offsets
        self._echo = echo

    @classmethod
    def echoed(cls, ids: Sequence[int], given: str | None, tokenizer: Tokenizer) -> ShownPrompt:
        """Return a prompt that precedes the answer. `given`: its text without special tokens; None: it came as ids."""
        decoder = tokenizer.stream(given is not None)
        offsets, size, parts = [], 0, []
        for token in ids:
            offsets.append(size)
            parts.append(decoder.step(token))
            size += len(parts[-1])
        text = "".join(parts) + decoder.flush() if given is None else given
        return cls(ids, text, [min(each, len(text)) for each in offsets], echo=True)

    def pieces(self, first: AnswerPiece) -> Iterator[AnswerPiece]:
        """Yield the pieces of the prompt. `first`: the first piece of the answer."""
        scores = first.prompt_logprobs
        known = len(scores) == len(self._ids) - 1
        if not known:  # not asked for, or the request was aborted
            if self._echo:
                yield PromptPiece(first.index, self._text, (), (), None)
            return
        for at in range(0, len(self._ids), PIECE):
            end = min(at + PIECE, len(self._ids))
            own = scores[max(at - 1, 0) : end - 1]
            tokens: list[OutputToken] = []
            if self._echo:
                shown = [
                    TokenLogprob(each.logprob, each.top_ids, each.top_logprobs, each.chosen) for each in own
                ]
                named = [None, *shown] if at == 0 else shown
                tokens = [OutputToken(*pair) for pair in zip(self._ids[at:end], named, strict=True)]
            yield PromptPiece(
                first.index,
                self._text if at == 0 else "",
                tokens,
                self._offsets[at:end],
                None,
                prompt_logprobs=own,
                first=at == 0,
            )

    def after(self, piece: AnswerPiece) -> AnswerPiece:
        """Return a piece of the answer as it follows the prompt."""
        size = len(self._text)
        return replace(piece, offsets=[size + each for each in piece.offsets], prompt_logprobs=())


async def with_prompt(
    pieces: AsyncGenerator[AnswerPiece, None], prompt: ShownPrompt
) -> AsyncGenerator[AnswerPiece, None]:
    """Yield the pieces of the prompt, then those of the answer."""
    begun = False
    async with aclosing(pieces):
        async for piece in pieces:
            if not begun:
                begun = True
                for each in prompt.pieces(piece):
                    yield each
                    await asyncio.sleep(0)
            yield prompt.after(piece)


class EchoFormat(CompletionFormat):
    """Formats completions whose log-probabilities begin with those of the prompt: null for its first token."""

    def _listed(self, piece: AnswerPiece) -> dict[str, Any] | None:
        listed = super()._listed(piece)
        if listed is None or not isinstance(piece, PromptPiece) or not (piece.first and piece.tokens):
            return listed
        name = self._names.token_text(piece.tokens[0].id)
        row = {"text_offset": 0, "tokens": name, "token_logprobs": None, "top_logprobs": None}
        return {column: [row[column], *values] for column, values in listed.items()}
