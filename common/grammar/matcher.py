"""The position of one request in its grammar: which tokens may come next, and which must."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from common.errors import InternalError, InvalidGrammar, RequestError

# [rows, mask_width(vocab_size)]; bit t % 32 of word t // 32: token t is allowed
Masks = npt.NDArray[np.int32]
ALL = -1  # a word whose tokens are all allowed
MAX_MESSAGE = 500


def mask_width(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask."""
    return -(-vocab_size // 32)


class Matcher:
    """Follows one answer through its grammar.

    A matcher that fails allows every token from then on and keeps the reason in `failure`: whoever owns the request
    checks it after `accept`, `fill` and `fill_tree`, and ends the request with it.

    Tokens that end the text are counted here and never by llguidance: once a grammar is complete, llguidance accepts
    such a token without recording it, so that its rollback would undo the token before.
    """

    def __init__(self, compiled: LLMatcher, eos: Collection[int], vocab_size: int) -> None:
        self._state = compiled
        self._eos = eos
        self._vocab_size = vocab_size
        self._bytes = 4 * mask_width(vocab_size)
        self.ended = False
        self.failure: RequestError | None = None

    def fork(self) -> Matcher:
        """Return an independent matcher in the same state."""
        copy = Matcher(self._state.deep_copy(), self._eos, self._vocab_size)
        copy.ended, copy.failure = self.ended, self.failure
        return copy

    @property
    def end_token(self) -> int:
        """The first of the tokens that end the text."""
        return next(iter(self._eos))

    @property
    def stopped(self) -> bool:
        """True once only a token that ends the text may follow."""
        return self.ended or self._state.is_stopped()

    @property
    def unmasked(self) -> int:
        """The number of further tokens that are drawn without a mask: none, since a grammar may forbid any."""
        return 0

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens that were emitted. Return False, with `failure` set, if the grammar forbids one."""
        for index, token in enumerate(tokens):
            if self.failure is not None:
                return False
            if self.ended or not self._advance(token):
                self._fail_at(token, index)
                return False
            self.ended = self.ended or token in self._eos
        return self.failure is None

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` next tokens of the text that the grammar forces, in the tokenizer's own split.

        Another split of the same text is legal too, so they are drafts and no certainty. A last token that could merge
        with what follows is left out. Empty if the grammar leaves a choice or the text is over.
        """
        if self.ended or self.failure is not None or limit < 1 or self._state.is_stopped():
            return []
        return self._state.compute_ff_tokens()[:limit]

    def fill(self, masks: Masks, row: int) -> None:
        """Write the tokens that may come next to a row; all of them if the text has ended or the matcher failed."""
        if self.ended or self.failure is not None:
            masks[row] = ALL
        else:
            self._write(masks, row, _address(masks))

    def fill_tree(self, masks: Masks, first_row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Write one row per node of a tree of candidates: what may come after the path to that node.

        Args:
            masks: rows first_row .. first_row + len(tokens) are written.
            tokens: tokens[0] is the last accepted token, the others are candidates.
            parents: parents[0] is ignored; parents[i] < i. A chain has parents[i] = i - 1.

        Rows of a candidate that the grammar forbids, of one that ends the text, and of all candidates below it allow
        every token: verification never gets past such a candidate.
        """
        masks[first_row : first_row + len(tokens)] = ALL
        if self.ended or self.failure is not None:
            return
        base = _address(masks)
        self._write(masks, first_row, base)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(len(tokens) - 1, 0, -1):
            children[parents[node]].append(node)
        path = [0]  # the nodes whose tokens are consumed, below the root
        while path and self.failure is None:
            below = children[path[-1]]
            if not below:
                if len(path) > 1:
                    self._state.rollback(1)
                path.pop()
                continue
            node = below.pop()
            if self._enter(tokens[node]):
                self._write(masks, first_row + node, base)
                path.append(node)
        if len(path) > 1:
            self._state.rollback(len(path) - 1)

    def _usable(self, token: int) -> bool:
        """Return whether llguidance may be asked about a token: one outside the vocabulary breaks its state."""
        return 0 <= token < self._vocab_size and token not in self._eos

    def _enter(self, token: int) -> bool:
        return self._usable(token) and self._state.try_consume_tokens([token]) == 1

    def _advance(self, token: int) -> bool:
        if token in self._eos:
            return self._state.is_accepting()
        return self._enter(token)

    def _write(self, masks: Masks, row: int, base: int) -> None:
        assert masks.shape[1] * 4 == self._bytes, "the masks are made for another vocabulary"
        self._state.unsafe_compute_mask_ptr(base + row * self._bytes, self._bytes)
        if self._state.is_error():
            masks[row] = ALL
            self.failure = self._too_complex()

    def _fail_at(self, token: int, index: int) -> None:
        if self._state.is_error():
            self.failure = self._too_complex()
        else:
            self.failure = InternalError(
                f"token {token}, number {index} of those emitted together, is not in the grammar"
            )

    def _too_complex(self) -> InvalidGrammar:
        reason = self._state.get_error()[:MAX_MESSAGE]
        return InvalidGrammar(f"the grammar became too complex in the middle of the answer: {reason}")


def _address(masks: Masks) -> int:
    assert masks.dtype == np.int32
    assert masks.flags.c_contiguous
    return int(masks.ctypes.data)
