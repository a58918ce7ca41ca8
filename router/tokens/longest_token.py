"""Computes the maximum number of characters of one token, so that long texts can be refused without encoding.

The bound is read from tokenizer.json. If a tokenizer can lose text (stripped characters, unknown words that become one
token, spaces absorbed by a special token), no number of characters is safe, and there is no bound. Each stage of the
tokenizer contributes the factor by which it may shrink the number of characters.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from router.tokens.detokenizer import BYTE_OF

# The longest canonical decomposition has 4 code points, so composition merges at most 4 into one.
COMPOSED = 4
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
_KEEPING_BEHAVIOURS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_KEEPING_POST_PROCESSORS = ("ByteLevel", "BertProcessing", "RobertaProcessing")


class _Unbounded(Exception):
    """A stage can lose text."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the bound in characters (code points), at least 1; None if there is no safe bound."""
    try:
        return _longest(msgspec.json.decode(tokenizer.to_str()), tokenizer)
    except (_Unbounded, KeyError, TypeError, AttributeError):  # the latter: an unknown format
        return None


def _longest(config: dict[str, Any], tokenizer: Tokenizer) -> int:
    normalizer = config.get("normalizer")
    shrink = _normalizer_shrink(normalizer)
    byte_level = _pre_tokenizer_is_byte_level(config.get("pre_tokenizer")) | _has(normalizer, "ByteLevel")
    _check_post_processor(config.get("post_processor"))
    vocabulary = _vocabulary(config["model"], byte_level)
    added = config.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):
        raise _Unbounded  # it absorbs all adjacent spaces
    contents = [token["content"] for token in added]
    # Added tokens with `normalized` are matched in normalized text, where they may be longer.
    if normalizer is not None:
        contents += [tokenizer.normalizer.normalize_str(content) for content in contents]
    return max(1, *(shrink * len(token) for token in (*vocabulary, *contents)))


def _normalizer_shrink(normalizer: dict[str, Any] | None) -> int:
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            shrink = 1
            for each in normalizer["normalizers"]:
                shrink *= _normalizer_shrink(each)
            return shrink
        case "NFC" | "NFKC":
            return COMPOSED
        case "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel":
            return 1
        case "Replace":
            pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
            if pattern and content:
                return max(1, -(-len(pattern) // len(content)))
    raise _Unbounded


def _pre_tokenizer_is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether one of the stages maps bytes to letters."""
    if pre_tokenizer is None:
        return False
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return any([_pre_tokenizer_is_byte_level(each) for each in pre_tokenizer["pretokenizers"]])
    if kind in ("Split", "Punctuation"):
        if pre_tokenizer["behavior"] not in _KEEPING_BEHAVIOURS:
            raise _Unbounded
    elif kind not in _KEEPING_PRE_TOKENIZERS:
        raise _Unbounded
    return bool(kind == "ByteLevel")


def _has(normalizer: dict[str, Any] | None, kind: str) -> bool:
    if normalizer is None:
        return False
    return normalizer["type"] == kind or any(_has(each, kind) for each in normalizer.get("normalizers", ()))


def _check_post_processor(processor: dict[str, Any] | None) -> None:
    if processor is None or processor["type"] in _KEEPING_POST_PROCESSORS:
        return
    if processor["type"] == "Sequence":
        for each in processor["processors"]:
            _check_post_processor(each)
    elif processor["type"] != "TemplateProcessing" or not any("Sequence" in e for e in processor["single"]):
        raise _Unbounded


def _vocabulary(model: dict[str, Any], byte_level: bool) -> list[str]:
    """Return the tokens of a model that yields at least one token per piece of text or per unknown character."""
    if model["type"] == "BPE":
        tokens = set(model["vocab"])
    elif model["type"] == "Unigram":
        tokens = {token for token, _ in model["vocab"]}
    else:
        raise _Unbounded  # a whole word may become one unknown token
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _Unbounded  # letters are known only with these affixes
    every_byte_letter = byte_level and tokens.issuperset(BYTE_OF)
    every_byte = bool(model.get("byte_fallback")) and tokens.issuperset(f"<0x{b:02X}>" for b in range(256))
    one_each = model["type"] == "BPE" and model.get("unk_token") in tokens and not model.get("fuse_unk")
    if not (every_byte_letter or every_byte or one_each):
        raise _Unbounded  # unknown characters are dropped, or several become one token
    return list(tokens)
