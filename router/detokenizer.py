"""Tokens to text one by one; half a character is never given out.

Byte-level vocabularies (Llama 3, Qwen, Mistral's newer ones, ours) are decoded here from a table of token bytes; every
other decoder is asked for the text of a small window of tokens, so that it sees what stands before the new token.

Why not `tokenizers.DecodeStream`: it waits for a text that does not end in U+FFFD, so a model that emits bytes which
are no UTF-8 gets silence, and each step decodes everything since.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

import msgspec
from tokenizers import Tokenizer as HfTokenizer

TAIL_TOKENS = 6  # prompt tokens that a new token's text may depend on: spaces at word starts, open characters
MAX_HELD = 16  # tokens held for an open character; UTF-8 needs at most 4, so this text is broken anyway
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder(Protocol):
    """The text of one choice as its tokens come. After `flush` it is used no more."""

    def step(self, token_id: int) -> str:
        """The text that became certain with this token; "" inside a character."""

    def flush(self) -> str:
        """The U+FFFD of a character that the answer began and did not finish."""


class TokenBytes:
    """The bytes that each token of a byte-level vocabulary stands for."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str | None] = {}  # tokens that are whole characters; None: they are not

    @staticmethod
    def fit(tokenizer: HfTokenizer) -> bool:
        """Whether the tokenizer's decoder is ByteLevel alone."""
        if tokenizer.decoder is None:
            return False
        described = msgspec.json.decode(tokenizer.decoder.__getstate__())
        steps = described.get("decoders", [described])
        return [step.get("type") for step in steps] == ["ByteLevel"]

    def __getitem__(self, token_id: int) -> bytes:
        """b"" for an id outside the vocabulary, as the library decodes it."""
        found = self._known.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._known[token_id] = b"" if token is None else _bytes_of(token)
        return found

    def text(self, token_id: int) -> str | None:
        """The token's text where it is whole characters, else None."""
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
    """For byte-level vocabularies: a table look-up per token, exact U+FFFD for what is not UTF-8."""

    def __init__(self, table: TokenBytes, skip: frozenset[int], prompt: Sequence[int]) -> None:
        """`skip`: tokens without text. The answer may complete an open character at the end of `prompt`."""
        self._table = table
        self._texts = table.texts
        self._skip = skip
        self._open = False  # inside a character
        self._decoder = _Utf8("replace")
        # bytes of the open character, all of them the prompt's, until the answer's first byte is known
        self._of_prompt = b""
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
                # the answer leaves the prompt's character unfinished: its U+FFFD is not part of the answer
                self._decoder.reset()
            self._of_prompt = b""
        text = self._decoder.decode(data)
        self._open = bool(self._decoder.getstate()[0])
        return text


class WindowDecoder:
    """For every other decoder: the text of the last tokens with and without the new one, O(1) per token."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_of: Callable[[int], str | None],
        skip: frozenset[int],
        prompt: Sequence[int],
    ) -> None:
        """`token_of`: the vocabulary's name of a token. The answer may complete an open character of the prompt."""
        self._decode = decode
        self._token_of = token_of
        self._skip = skip
        # special tokens between words do not hide the words from a decoder that looks at its first token
        tail = [token for token in prompt[-8 * TAIL_TOKENS :] if token not in skip][-TAIL_TOKENS:]
        self._window = tail  # tokens whose text is out, then those whose text is held
        self._of_prompt = _open_bytes(list(map(token_of, tail)))  # held tokens that are not the answer's
        self._out = len(tail) - self._of_prompt
        self._before = decode(tail[: self._out]) if tail else ""  # the text of the tokens that are out

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
        # a decoder may change what it said before (byte fallback, when a run of bytes turns out to be broken)
        new = text[len(self._before) :] if text.startswith(self._before) else self._decode(held)
        if self._of_prompt:
            if _broken([self._token_of(token) for token in held]):
                # the decoder shows each byte of a broken run as U+FFFD; the prompt's are not part of the answer
                new = new.removeprefix(REPLACEMENT * self._of_prompt)
            self._of_prompt = 0
        self._window = held
        self._out = len(held)
        self._before = self._decode(held)
        return new


def _open_bytes(tokens: Sequence[str | None]) -> int:
    """How many byte-fallback tokens (<0xE2>) at the end are an unfinished character."""
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
    """Whether `byte` may follow in the character that `opened` begins."""
    try:
        _Utf8().decode(opened + byte)
    except UnicodeDecodeError:
        return False
    return True


def _broken(tokens: Sequence[str | None]) -> bool:
    """Whether the byte-fallback tokens at the beginning are not UTF-8."""
    run = takewhile(bool, (_BYTE_TOKEN.fullmatch(token or "") for token in tokens))
    try:
        bytes(int(found[1], 16) for found in run if found).decode()
    except UnicodeDecodeError:
        return True
    return False


def _alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = (byte for byte in range(256) if byte not in plain)
    return table | {chr(256 + number): byte for number, byte in enumerate(rest)}


_BYTE_OF = _alphabet()


def _bytes_of(token: str) -> bytes:
    """As the library: a token with any character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
