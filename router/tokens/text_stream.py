"""Turns the tokens of one choice into text and cuts it at stop strings, wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.messages.generation import FINISH_STOP, OutputToken
from router.tokens.detokenizer import IncrementalDecoder
from router.tokens.stop_strings import StopMatcher


class TextStream:
    """The text of one choice: `push` tokens as they arrive; `finish_reason` is set when the answer is over.

    A stop token (the last token when `finish_reason` is "stop") yields no text unless stops are included. An answer
    whose grammar is complete may stop with another token, which does. A stop string counts only if a token past the
    first `min_tokens` completes it. Log-probabilities are returned by the push that brings their token, even while its
    text is held back.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str],
        include_stop: bool,
        min_tokens: int = 0,
        stop_ids: Collection[int] | None = None,
        reported_ids: Collection[int] = (),
    ) -> None:
        """`stop_ids`: the stop tokens; None: the last token of an answer that stops is always one.

        `reported_ids`: those that become the `stop_reason`.
        """
        self._step = decoder.step
        self._flush = decoder.flush
        self._stops = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._reported_ids = reported_ids
        self._decoded = 0  # characters returned or held back
        self.completion_tokens = 0
        # for the last push, per counted token: characters of the answer that precede it
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        # What has ended the text: a stop string or a token id. `stop_reason` leaves out ids that are not reported.
        self.matched_stop: str | int | None = None
        self.stop_reason: str | int | None = None

    def push(
        self, tokens: Sequence[OutputToken], finish_reason: str | None
    ) -> tuple[str, Sequence[OutputToken]]:
        """Return (new text, counted tokens). After a stop string the rest of `tokens` is dropped."""
        if len(tokens) == 1 and finish_reason is None:
            # One token that is not the last one: most pushes.
            self.completion_tokens += 1
            self.offsets = [self._decoded]
            piece = self._step(tokens[0].id)
            if self._stops is None:
                self._decoded += len(piece)
                return piece, tokens
            return self._advance(piece), tokens
        text = ""
        self.offsets = []
        last = len(tokens) - 1 if finish_reason is not None else -1
        for index, token in enumerate(tokens):
            self.completion_tokens += 1
            self.offsets.append(self._decoded)
            silent = index == last and finish_reason == FINISH_STOP and self._is_silent_stop(token.id)
            text += self._advance("" if silent else self._step(token.id))
            if self.finish_reason is not None:
                return text, tokens[: index + 1]
        if finish_reason is not None:
            text += self._advance(self._flush())
            if self.finish_reason is None:
                text += self._stops.flush() if self._stops else ""
                self.finish_reason = finish_reason
                if finish_reason == FINISH_STOP and tokens:
                    self.matched_stop = tokens[-1].id
                    self.stop_reason = self.matched_stop if self.matched_stop in self._reported_ids else None
        return text, tokens

    def _is_silent_stop(self, token: int) -> bool:
        return not self._include_stop and (self._stop_ids is None or token in self._stop_ids)

    def _advance(self, piece: str) -> str:
        """Add text and return what is certain. Sets finish_reason when a stop string is complete."""
        self._decoded += len(piece)
        if self._stops is None or not piece:
            return piece
        text = self._stops.push(piece, armed=self.completion_tokens > self._min_tokens)
        if self._stops.matched is not None:
            self.finish_reason = FINISH_STOP
            self.stop_reason = self.matched_stop = self._stops.matched
        return text
