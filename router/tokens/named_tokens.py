"""Completes a tokenizer.json with special tokens that only tokenizer_config.json lists, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.checkpoint.json_fields import Raw
from common.checkpoint.tokenizer_config import ADDED, listed_tokens, named_tokens

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def complete(tokenizer: Tokenizer, config: Raw) -> frozenset[int]:
    """Make the tokens of `config` special: their text in a prompt is one token. Return the ids of those with a name.

    A chat template prints such tokens, and their text would otherwise be cut into ordinary ones. A token that the
    vocabulary lacks, such as one for padding, has no embedding, and stays text.
    """
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    added = dict(_numbered(tokenizer, config, known))
    for text in listed_tokens(config):
        if text not in known and tokenizer.token_to_id(text) is not None:
            added.setdefault(text, AddedToken(text, special=True))
    named = set(named_tokens(config).values())
    for text in named:
        token = added.get(text) or known.get(text)
        if token is None and tokenizer.token_to_id(text) is None:
            continue
        if token is None or not token.special:
            flags = {} if token is None else {flag: getattr(token, flag) for flag in FLAGS}
            added[text] = AddedToken(text, special=True, **flags)
    tokenizer.add_tokens(list(added.values()))
    ids = {tokenizer.token_to_id(text) for text in named}
    return frozenset(each for each in ids if each is not None)


def _numbered(
    tokenizer: Tokenizer, config: Raw, known: Mapping[str, AddedToken]
) -> Iterator[tuple[str, AddedToken]]:
    """Yield the tokens that `added_tokens_decoder` has in addition, as far as they get the ids that it gives."""
    listed: Any = config.get(ADDED)
    size: int = tokenizer.get_vocab_size()
    for key, value in sorted(listed.items(), key=_number) if isinstance(listed, dict) else ():
        text = value.get("content") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text or text in known:
            continue
        found = tokenizer.token_to_id(text)
        if str(size if found is None else found) != key:
            continue
        size += found is None
        flags = {flag: value[flag] for flag in (*FLAGS, "special") if isinstance(value.get(flag), bool)}
        yield text, AddedToken(text, **flags)


def _number(entry: tuple[str, Any]) -> int:
    return int(entry[0]) if entry[0].isdecimal() and len(entry[0]) < 10 else -1
