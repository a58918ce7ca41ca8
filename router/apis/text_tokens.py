"""Finds the tokens of the text of an answer among those of its reasoning, its calls and the markers between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.messages.generation import OutputToken
from router.answers.openai_responses import AnswerPiece
from router.chat.answer_events import Span

# Characters at the end of an answer whose tokens are kept: more than what a parser holds back until it knows whether it
# is text.
KEPT = 1 << 17


class TextTokens:
    """Follows one answer: `add` a piece, then ask for the tokens of each text that was read from it, in order."""

    def __init__(self) -> None:
        self._size = 0  # characters of the answer so far
        # Tokens that may still belong to a text, each with the characters of the answer that precede it.
        self._tokens: deque[tuple[int, OutputToken]] = deque()

    def add(self, piece: AnswerPiece) -> None:
        self._size += len(piece.text)
        self._tokens.extend(zip(piece.offsets, piece.tokens))
        while len(self._tokens) > 1 and self._tokens[1][0] < self._size - KEPT:
            self._tokens.popleft()

    def of(self, spans: Sequence[Span]) -> list[OutputToken]:
        """Return the tokens of a text that the model has written there, in whole or in part.

        A token belongs to one text only: to the first of those that it shows some of. One without text, such as the
        first bytes of a character, belongs to what follows it.
        """
        found: list[OutputToken] = []
        tokens = self._tokens
        for start, end in spans:
            while tokens and tokens[0][0] < end:
                offset, token = tokens.popleft()
                # The text goes on to `end`, and the last token is what it ends with.
                if offset >= start or not tokens or tokens[0][0] > start:
                    found.append(token)
        return found
