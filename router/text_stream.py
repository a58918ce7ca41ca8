"""One choice of an answer: tokens in, text out, cut at stop strings wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages.generation import FINISH_STOP, OutputToken
from router.tokenizer import IncrementalDecoder


class TextStream:
    """`push` tokens as they come; `finish_reason` is set when the answer is over.

    Text that might be the beginning of a stop string is held back until it is certain; nothing else is.
    """

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], include_stop: bool) -> None:
        self._decoder = decoder
        self._stops = stops
        self._include_stop = include_stop
        self._window = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""  # text not given out yet
        self.completion_tokens = 0
        self.emitted = 0  # characters given out
        self.finish_reason: str | None = None

    def push(self, tokens: Sequence[OutputToken], finish_reason: str | None) -> tuple[str, list[OutputToken]]:
        """(new text, tokens that count). After a stop string the rest of `tokens` is dropped."""
        parts: list[str] = []
        for index, token in enumerate(tokens):
            self.completion_tokens += 1
            last = finish_reason is not None and index == len(tokens) - 1
            piece = self._decoder.step(token.id)
            if last:
                piece += self._decoder.flush()
            parts.append(self._advance(piece))
            if self.finish_reason is not None:
                return self._emit("".join(parts)), list(tokens[: index + 1])
        if finish_reason is not None:
            parts.append(self._held)
            self._held = ""
            self.finish_reason = finish_reason
        return self._emit("".join(parts)), list(tokens)

    def _emit(self, text: str) -> str:
        self.emitted += len(text)
        return text

    def _advance(self, piece: str) -> str:
        """Add text; returns what is certain. Sets finish_reason when a stop string is complete."""
        if not self._stops:
            return piece
        if not piece:
            return ""
        self._held += piece
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda pair: (pair[0], len(pair[1])))
            text = self._held[: at + len(stop) if self._include_stop else at]
            self._held = ""
            self.finish_reason = FINISH_STOP
            return text
        keep = self._possible_start()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(self._window, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
