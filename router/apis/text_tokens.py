"""Finds the tokens of the parts of an answer, of which only the text is told: other tokens are markers between them."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages.generation import OutputToken
from router.answers.openai_responses import AnswerPiece

# Characters after the last part that are kept at least: more than a parser holds back. What comes before is what the
# client does not get.
KEPT = 1 << 16


class TextTokens:
    """Follows one answer: `add` a piece, then ask for the tokens of the parts that were read from it."""

    def __init__(self) -> None:
        self._text = ""  # what the model has written after the last part
        self._start = 0  # characters of the answer that precede `_text`
        # Tokens of `_text`, and those whose text is still held back: each with the characters that precede it.
        self._tokens: list[tuple[int, OutputToken]] = []

    def add(self, piece: AnswerPiece) -> None:
        self._text += piece.text
        self._tokens += zip(piece.offsets, piece.tokens)
        if len(self._text) > 2 * KEPT:
            self._drop(len(self._text) - KEPT)

    def of(self, parts: Sequence[str], held: int = 0) -> list[list[OutputToken]]:
        """Return the tokens of each of these texts, which follow each other. One that is not found has none.

        They are looked for from the end, because what the client does not get, such as hidden reasoning, comes before.

        `held`: characters at the end that the parser holds back, which may be equal to a part.
        """
        found: list[list[OutputToken]] = []
        last, end = 0, len(self._text) - held
        for part in reversed(parts):
            at, size = self._place_of(part, end)
            if size:
                last, end = max(last, at + size), at
            found.append(self._within(self._start + at, self._start + at + size) if size else [])
        if last:
            self._drop(last)
        return found[::-1]

    def _place_of(self, part: str, end: int) -> tuple[int, int]:
        """Return where a part begins in `_text[:end]`, and its characters there: none if it is not found."""
        # Blanks around a part may come from the other side of a marker.
        for shown in (part, part.strip()):
            if shown and (at := self._text.rfind(shown, 0, end)) >= 0:
                return at, len(shown)
        return 0, 0

    def _within(self, start: int, end: int) -> list[OutputToken]:
        """Return the tokens of which at least a part is between two positions in the answer."""
        following = [*(offset for offset, _ in self._tokens[1:]), end]
        return [
            token
            for (offset, token), after in zip(self._tokens, following, strict=True)
            if offset < end and (offset >= start or after > start)
        ]

    def _drop(self, characters: int) -> None:
        self._text = self._text[characters:]
        self._start += characters
        self._tokens = [each for each in self._tokens if each[0] >= self._start]
