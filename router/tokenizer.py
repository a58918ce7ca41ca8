"""Text to token ids and back, with `tokenizers` alone: no torch, no transformers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from common.errors import ModelError

INLINE_CHARACTERS = 4096  # shorter texts encode faster than a thread hop takes
ENCODE_THREADS = 2


class Tokenizer:
    """tokenizer.json of a model directory."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json; tandem reads fast tokenizers only")
        try:
            self._tokenizer = HfTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every kind of bad file
            raise ModelError(f"{file} cannot be read: {error}") from error
        self._pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode")

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Long texts are encoded off the event loop. Lone surrogates become U+FFFD."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode, text, add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token alone, as logprobs show it; part of a character shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def stream(self, skip_special_tokens: bool) -> IncrementalDecoder:
        return IncrementalDecoder(self._tokenizer, skip_special_tokens)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


class IncrementalDecoder:
    """Token by token to text; never emits half a character. O(1) per token."""

    def __init__(self, tokenizer: HfTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []  # tokens since the last text came out

    def step(self, token_id: int) -> str:
        """The text that became certain with this token; "" inside a character."""
        piece: str | None = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return piece

    def flush(self) -> str:
        """What an unfinished character at the end shows as: U+FFFD."""
        held, self._held = self._held, []
        return str(self._tokenizer.decode(held, skip_special_tokens=self._skip)) if held else ""
