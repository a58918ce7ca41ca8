"""The hidden states of one answer: collected over all attempts, then shown.

Position p is the p-th token of prompt and answer. Its state is what the next token was drawn from, so an answer with n
tokens has the states of its prompt and of its first n - 1 tokens. The prefill node of an attempt sends those of the
tokens that it was given, the decode node those of the tokens after them; either may be ahead of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from common.errors import InternalError

VALUE_BYTES = 4  # float32
_encode = msgspec.json.Encoder().encode
ENCODED = 1 << 16  # values per block, which takes some 10 ms to encode as JSON


class AnswerStates:
    """The states of the positions from `first` on."""

    def __init__(self, first: int, prompt_tokens: int, max_tokens: int, hidden_size: int) -> None:
        self.first = first
        self._prompt_tokens = prompt_tokens
        self._most = prompt_tokens + max_tokens  # positions
        self._row = VALUE_BYTES * hidden_size
        self._given = prompt_tokens  # tokens that the prefill node of this attempt computes
        self._prompt = bytearray()  # rows of positions below `_given`
        self._decoded = bytearray()  # rows of positions from `_given` on

    @property
    def wanted_from(self) -> int:
        """The first position whose state this attempt has to send."""
        return self.first + len(self._prompt) // self._row

    def resume(self, tokens: int) -> None:
        """Begin an attempt with the prompt and the answer so far, `tokens` in total.

        States of tokens that have not reached the client are dropped: the new attempt computes them again.
        """
        known = tokens - 1 if tokens > self._prompt_tokens else self.first
        if self.wanted_from == self._given:
            self._prompt += self._decoded
        self._decoded.clear()
        del self._prompt[max(known - self.first, 0) * self._row :]
        self._given = tokens

    def add_prefilled(self, start: int, data: bytes) -> None:
        """Add consecutive states from the prefill node, position `start` first. Raises InternalError for wrong ones."""
        if not self._follows(start, data, self.first, self._prompt, self._given):
            raise InternalError(
                "the prefill node sent hidden states of other positions than those that follow"
            )
        self._prompt += data

    def add_decoded(self, start: int, data: bytes) -> None:
        """Add consecutive states from the decode node, position `start` first. Raises InternalError for wrong ones."""
        if not self._follows(start, data, self._given, self._decoded, self._most):
            raise InternalError(
                "the decode node sent hidden states of other positions than those that follow"
            )
        self._decoded += data

    def _follows(self, start: int, data: bytes, first: int, held: bytearray, end: int) -> bool:
        """Return whether whole states of `data` follow those that are held from `first` on, and precede `end`."""
        following, part = first + len(held) // self._row, len(data) % self._row
        return bool(data) and not part and start == following and start + len(data) // self._row <= end

    @property
    def max_bytes(self) -> int:
        """The most bytes that its states can take."""
        return (self._most - 1 - self.first) * self._row

    def count(self, tokens: int) -> int:
        """Return how many states an answer of `tokens` tokens has. Raises InternalError if one is missing."""
        wanted = self._prompt_tokens + tokens - 1 - self.first if tokens else 0
        if wanted * self._row > len(self._prompt) + len(self._decoded):
            raise InternalError("the nodes left out hidden states of the answer")
        return wanted

    def last(self, tokens: int) -> list[float] | None:
        """Return the state that the last of `tokens` tokens was drawn from; None without tokens."""
        count = self.count(tokens)
        return self.row(count - 1) if count else None

    def encoded(self, tokens: int) -> Iterator[bytes]:
        """Return JSON in parts: a list of the prompt's states, then one state for each token but the last.

        Raises InternalError at once if a state is missing. Each part is made when it is taken: all of the JSON would
        take five times the memory of the states.
        """
        return self._encoded(self.count(max(tokens, 1)))

    def _encoded(self, count: int) -> Iterator[bytes]:
        prompt = min(self._prompt_tokens - self.first, count)
        before = b"[["
        for block in self.blocks(0, prompt):
            yield before + _encode(block)[1:-1]
            before = b","
        yield b"]"
        for block in self.blocks(prompt, count):
            yield b"," + _encode(block)[1:-1]
        yield b"]"

    def row(self, index: int) -> list[float]:
        """Return the state of position first + index."""
        at = index * self._row
        if at < len(self._prompt):
            return _values(self._prompt, at, at + self._row)
        at -= len(self._prompt)
        return _values(self._decoded, at, at + self._row)

    def blocks(self, begin: int, end: int) -> Iterator[list[list[float]]]:
        """Yield the states begin .. end in blocks of a bounded size."""
        size = max(ENCODED * VALUE_BYTES // self._row, 1)
        for at in range(begin, end, size):
            yield [self.row(index) for index in range(at, min(at + size, end))]


def _values(rows: bytearray, begin: int, end: int) -> list[Any]:
    values: list[Any] = np.frombuffer(memoryview(rows)[begin:end], "<f4").tolist()
    return values
