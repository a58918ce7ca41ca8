"""Converts text to token ids and back with the `tokenizers` library only: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from common.checkpoint.added_tokens import is_marker
from common.checkpoint.model_directory import MAX_TOKENIZER_BYTES, read_bytes
from common.checkpoint.tokenizer_config import read_tokenizer_config
from common.errors import ModelError
from common.grammar.token_marker import Symbols, by_id
from common.rust_panics import is_panic
from router.tokens.detokenizer import ByteDecoder, IncrementalDecoder, TokenBytes, WindowDecoder
from router.tokens.longest_token import longest_token
from router.tokens.named_tokens import complete


class Tokenizer:
    """The tokenizer.json of a model directory."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json; tandem reads fast tokenizers only: write it with transformers "
                f"(AutoTokenizer.from_pretrained, then save_pretrained)"
            )
        content = read_bytes(file, MAX_TOKENIZER_BYTES)
        try:
            self._tokenizer = HfTokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception for every kind of invalid file
            raise ModelError(f"{file} cannot be read: {error}") from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ModelError(f"{file} cannot be read: {error}") from error
        # A truncation length in the file would cut prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = complete(self._tokenizer, read_tokenizer_config(path))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._special = named | {token_id for token_id, token in self._added.items() if token.special}
        self._markers = {
            token_id for token_id, token in self._added.items() if is_marker(token.content, token.special)
        }
        self._texts: dict[int, str] = {}  # token id -> its text in isolation; bounded by the vocabulary
        self._bytes = TokenBytes(self._tokenizer) if TokenBytes.fit(self._tokenizer) else None
        self._longest = longest_token(self._tokenizer)

    def json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1) + 1

    def beyond(self, vocab_size: int) -> tuple[list[str], int]:
        """Return the added tokens that a model of this vocabulary lacks, and the number of other such tokens."""
        if self.vocab_size <= vocab_size:
            return [], 0
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        lacking = sorted((number, text) for text, number in vocabulary.items() if number >= vocab_size)
        added = [text for number, text in lacking if number in self._added]
        return added, len(lacking) - len(added)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize. Lone surrogates become U+FFFD.

        Megabytes of text take seconds and gigabytes, so large texts are encoded in text workers (`router/text`).
        """
        text = _without_surrogates(text)
        # The fast variant skips offsets, which nothing here needs.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens that `encode` returns, computed without encoding."""
        if self._longest is None:
            return 0
        return -(-len(_without_surrogates(text)) // self._longest)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token as log-probabilities show it; part of a character shows as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; exact for byte-level vocabularies, even if they are only part of a character."""
        return self._bytes[token_id] if self._bytes is not None else self.token_text(token_id).encode()

    def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """Return entries of the vocabulary, which need not be text: a byte-level one writes a space as "\u0120"."""
        entry = self._tokenizer.id_to_token
        return [entry(token_id) or "" for token_id in token_ids]

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def markers_in(self, text: str) -> dict[str, int]:
        """Return the ids of the tokens whose text is part of `text` and which a grammar matches by their ids only."""
        named = {self._added[each].content: each for each in sorted(self._markers)}
        return {name: each for name, each in named.items() if name and name in text}

    def symbols_of(self, token_id: int) -> Symbols:
        """Return the bytes of a token, or its id if a grammar matches it by its id only."""
        return by_id(token_id) if token_id in self._markers else self.token_bytes(token_id) or by_id(token_id)

    def tokens_within(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another one, where a line begins."""
        before, whole = self.encode("\n", False), self.encode(f"\n{text}", False)
        return whole[len(before) :] if whole[: len(before)] == before else self.encode(text, False)

    def stream(
        self,
        skip_special_tokens: bool,
        prompt: Sequence[int] = (),
        kept: frozenset[int] = frozenset(),
    ) -> IncrementalDecoder:
        """Return a decoder whose output is what the answer adds to the text when decoded together with `prompt`.

        `kept`: special tokens that are never skipped.
        """
        special = self._special - kept if kept else self._special
        skip = special if skip_special_tokens else frozenset[int]()
        if self._bytes is not None:
            return ByteDecoder(self._bytes, skip, prompt)
        return WindowDecoder(
            lambda ids: self.decode(ids, skip_special_tokens and not kept),
            self._tokenizer.id_to_token,
            skip,
            prompt,
        )


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
