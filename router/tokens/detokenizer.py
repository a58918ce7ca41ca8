"""Incremental detokenization: converts tokens to text one by one and never emits part of a character.

Byte-level vocabularies (Llama 3, Qwen, newer Mistral models, the shipped models) are decoded from a table of token
bytes. Every other decoder is asked for the text of a small window of tokens, so that it sees the tokens that precede
the new one. `tokenizers.DecodeStream` is not used: it waits for text that does not end in U+FFFD, so bytes that are not
UTF-8 stop the output, and each step then decodes everything since.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

import msgspec
from tokenizers import Tokenizer as HfTokenizer

# Prompt tokens that can affect the text of a new token: leading spaces, incomplete characters.
TAIL_TOKENS = 6
MAX_HELD = 16  # tokens held for an incomplete character; UTF-8 needs at most 4, so more means invalid text
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder(Protocol):
    """Decodes the tokens of one choice. It must not be used after `flush`."""

    def step(self, token_id: int) -> str:
        """Return the text that this token completes; "" inside a character."""

    def flush(self) -> str:
        """Return U+FFFD if the answer ends inside a character, otherwise ""."""


class TokenBytes:
    """The bytes of each token of a byte-level vocabulary."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str | None] = {}  # text of tokens that are whole characters; None for others

    @staticmethod
    def fit(tokenizer: HfTokenizer) -> bool:
        """Return whether the tokenizer's decoder is ByteLevel and nothing else."""
        if tokenizer.decoder is None:
            return False
        described = msgspec.json.decode(tokenizer.decoder.__getstate__())
        steps = described.get("decoders", [described])
        return [step.get("type") for step in steps] == ["ByteLevel"]

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an id outside the vocabulary, as the library decodes it."""
        found = self._known.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._known[token_id] = b"" if token is None else _bytes_of(token)
        return found

    def text(self, token_id: int) -> str | None:
        """Return the token's text if it consists of whole characters, otherwise None."""
        try:
            return self.texts[token_id]
        except KeyError:
            try:
                text: str | None = self[token_id].decode()
            except UnicodeDecodeError:
                text = None
            self.texts[token_id] = text
            return text


class ByteDecoder:
    """Decodes byte-level vocabularies: one table look-up per token, and U+FFFD exactly for invalid UTF-8."""

    def __init__(self, table: TokenBytes, skip: frozenset[int], prompt: Sequence[int]) -> None:
        """`skip`: tokens without text. The answer may complete a character that `prompt` leaves incomplete."""
        self._table = table
        self._texts = table.texts
        self._skip = skip
        self._open = False  # inside an incomplete character
        self._decoder = _Utf8("replace")
        # bytes of an incomplete character at the end of the prompt, until the first byte of the answer is known
        self._of_prompt = b""
        if prompt and prompt[-1] not in skip and table.text(prompt[-1]):
            return  # the prompt ends with a whole character
        tail = b"".join(table[token] for token in prompt[-TAIL_TOKENS:] if token not in skip)
        if tail and tail[-1] >= 0x80:
            self._decode(tail)
            self._of_prompt = self._decoder.getstate()[0]

    def step(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if not self._open:
            try:
                text = self._texts[token_id]
            except KeyError:
                text = self._table.text(token_id)
            if text is not None:
                return text
        return self._decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", True) if self._open and not self._of_prompt else ""

    def _decode(self, data: bytes) -> str:
        if data and self._of_prompt:
            if not _continues(self._of_prompt, data[:1]):
                # The answer does not complete the prompt's character; the U+FFFD of that is not part of the answer.
                self._decoder.reset()
            self._of_prompt = b""
        text = self._decoder.decode(data)
        self._open = bool(self._decoder.getstate()[0])
        return text


class WindowDecoder:
    """Decodes every other vocabulary: compares the text of the last tokens with and without the new one, in O(1)."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_of: Callable[[int], str | None],
        skip: frozenset[int],
        prompt: Sequence[int],
    ) -> None:
        """`token_of` returns the vocabulary entry of a token. The answer may complete a character of the prompt."""
        self._decode = decode
        self._token_of = token_of
        self._skip = skip
        # Skip special tokens: the decoder treats the first token of a window differently, so a word must come first.
        tail = [token for token in prompt[-8 * TAIL_TOKENS :] if token not in skip][-TAIL_TOKENS:]
        self._window = tail  # tokens whose text is emitted, then tokens whose text is held
        self._of_prompt = _open_bytes(list(map(token_of, tail)))  # held tokens that belong to the prompt
        self._out = len(tail) - self._of_prompt
        self._before = decode(tail[: self._out]) if tail else ""  # the text of the emitted tokens

    def step(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._before):
            return "" if len(self._window) - self._out < MAX_HELD else self._advance(text)
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if len(self._window) > self._out else ""

    def _advance(self, text: str) -> str:
        held = self._window[self._out :]
        # A decoder may revise earlier text (byte fallback, once a run of bytes turns out to be invalid).
        new = text[len(self._before) :] if text.startswith(self._before) else self._decode(held)
        if self._of_prompt:
            if _broken([self._token_of(token) for token in held]):
                # The decoder prints each byte of an invalid run as U+FFFD; those of the prompt are not part of the
                # answer.
                new = new.removeprefix(REPLACEMENT * self._of_prompt)
            self._of_prompt = 0
        self._window = held
        self._out = len(held)
        self._before = self._decode(held)
        return new


def _open_bytes(tokens: Sequence[str | None]) -> int:
    """Count the byte-fallback tokens (<0xE2>) at the end that form an incomplete character."""
    run: list[int] = []
    for token in reversed(tokens):
        found = _BYTE_TOKEN.fullmatch(token or "")
        if found is None:
            break
        run.append(int(found[1], 16))
    decoder = _Utf8("replace")
    decoder.decode(bytes(reversed(run)))
    return len(decoder.getstate()[0])


def _continues(opened: bytes, byte: bytes) -> bool:
    """Return whether `byte` may follow `opened`, the first bytes of a character."""
    try:
        _Utf8().decode(opened + byte)
    except UnicodeDecodeError:
        return False
    return True


def _broken(tokens: Sequence[str | None]) -> bool:
    """Return whether the leading byte-fallback tokens are invalid UTF-8."""
    run = takewhile(bool, (_BYTE_TOKEN.fullmatch(token or "") for token in tokens))
    try:
        bytes(int(found[1], 16) for found in run if found).decode()
    except UnicodeDecodeError:
        return True
    return False


def _alphabet() -> dict[str, int]:
    """Map each character of GPT-2's byte alphabet to the byte that it represents."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = (byte for byte in range(256) if byte not in plain)
    return table | {chr(256 + number): byte for number, byte in enumerate(rest)}


BYTE_OF = _alphabet()


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token. As in the library, a token with a character outside the alphabet is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
