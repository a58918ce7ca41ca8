"""No prompt that fits is refused without encoding it: the bound also holds for tokenizers that shorten texts."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from common.errors import ContextTooLong
from common.observability.logs import Log
from router.requests.checks import check_length
from router.requests.field_rules import UnknownFields
from router.requests.prompt_length import PromptLength
from router.templates.chat_template import ChatTemplate
from router.text.service import TextService
from router.text.work import TextWork
from router.tokens import tokenizer as own
from router.tokens.longest_token import COMPOSED, longest_token
from tests.fakes.text_workers import InProcess
from tests.unit.router.conftest import TINY, Rig
from tests.unit.router.tokens.vocabularies import KINDS, byte_level, llama2

ALPHABET = [
    *"the answr12END.",
    " ",
    "  ",
    " " * 40,
    "\n",
    "\t",
    "é",
    "e\u0301",
    "한",
    "한".encode().decode(),
    "\u1f82",
]
ALPHABET += [" " * 20 + "!", "!" + " " * 20]
ALPHABET += [
    "α\u0313\u0300\u0345",
    "ﬁ",
    "ﷺ",
    "İ",
    "漢",
    "😀",
    "\0",
    "\u200b",
    "<s>",
    "<|x y|>",
    " the",
    "▁▁",
    "aaaaaaaa",
]
PIECES = st.builds(str.__mul__, st.sampled_from(ALPHABET) | st.characters(codec="utf-8"), st.integers(1, 20))
TEXTS = st.lists(PIECES, max_size=4).map("".join)
SWALLOWS = (None, "lstrip", "rstrip", "normalized")
NORMALIZERS: list[Callable[[], object]] = [
    normalizers.NFC,
    normalizers.NFKC,
    normalizers.NFD,
    normalizers.NFKD,
    normalizers.Lowercase,
    normalizers.StripAccents,
    normalizers.Strip,
    normalizers.Nmt,
    normalizers.BertNormalizer,
    lambda: normalizers.Prepend("▁"),
    lambda: normalizers.Replace(" ", "▁"),
    lambda: normalizers.Replace("  ", " "),
    lambda: normalizers.Replace("a", ""),
    lambda: normalizers.Replace(Regex(r"\s+"), " "),
    lambda: normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace("aaaa", "a"), normalizers.Lowercase()]
    ),
]
PRE_TOKENIZERS: list[Callable[[], object]] = [
    lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    ),
    lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]),
    pre_tokenizers.Metaspace,
    pre_tokenizers.Whitespace,
]


def bytes_alone() -> Tokenizer:
    """One token per byte: the tightest possible bound."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


def characters_alone() -> Tokenizer:
    """One token per character, known or not."""
    letters = ["?", *"the answr12D", "é", "한", "\u1f82", "▁"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    return Tokenizer(models.BPE(vocabulary, [], unk_token="?", fuse_unk=False))


ALL_KINDS = {**KINDS, "bytes alone": bytes_alone, "characters alone": characters_alone}


@pytest.fixture(scope="module")
def bounded() -> list[tuple[Tokenizer, int]]:
    """Return every combination that has a bound, with that bound."""
    found = []
    for make in ALL_KINDS.values():
        plain = make().to_str()
        for normalizer, pre, swallows in product([None, *NORMALIZERS], [None, *PRE_TOKENIZERS], SWALLOWS):
            tokenizer: Any = Tokenizer.from_str(plain)
            if normalizer is not None:
                tokenizer.normalizer = normalizer()
            if pre is not None:
                tokenizer.pre_tokenizer = pre()
            if swallows is not None:
                tokenizer.add_tokens([AddedToken("!", **{swallows: True})])
            longest = longest_token(tokenizer)
            if longest is not None:
                found.append((tokenizer, longest))
    assert len(found) > 100
    return found


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound_says(
    text: str, bounded: list[tuple[Tokenizer, int]]
) -> None:
    for tokenizer, longest in bounded:
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert tokens * longest >= len(text), (tokens, longest, tokenizer.to_str())


def test_usual_tokenizers_have_a_bound() -> None:
    """The kinds of GPT-2 and Llama 3, of Llama 2 with all bytes, and with the normalizer of Qwen."""
    assert longest_token(bytes_alone()) == 1
    assert longest_token(characters_alone()) == 1
    assert longest_token(byte_level()) == max(map(len, byte_level().get_vocab()))
    assert longest_token(llama2()) == 6  # <0x00>
    qwen = byte_level()
    qwen.normalizer = normalizers.NFC()
    assert longest_token(qwen) == 4 * max(map(len, qwen.get_vocab()))


@pytest.mark.parametrize("kind", ["words", "metaspace"])
def test_a_model_that_fuses_unknown_text_has_none(kind: str) -> None:
    tokenizer = KINDS[kind]()
    assert longest_token(tokenizer) is None
    assert len(tokenizer.encode("ж" * 500, add_special_tokens=False).ids) <= 2


def test_whatever_drops_text_has_no_bound() -> None:
    incomplete = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fusing = llama2()
    fusing.model = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)
    dropping = byte_level()
    dropping.post_processor = processors.TemplateProcessing(single="<s>", special_tokens=[("<s>", 0)])
    for tokenizer in (incomplete, wordpiece, fusing, dropping):
        assert longest_token(tokenizer) is None


def test_no_composition_is_longer_than_assumed() -> None:
    """Checks, for the Unicode version of this Python, how many code points NFC composes into one."""
    longest = max(len(unicodedata.normalize("NFD", chr(each))) for each in range(0x110000))
    assert longest == COMPOSED


def test_a_file_of_an_unknown_form_has_no_bound() -> None:
    class Odd:
        def __init__(self, config: object) -> None:
            self._config = config

        def to_str(self) -> str:
            return json.dumps(self._config)

    odd: list[Any] = [
        {},
        {"model": {"type": "New", "vocab": {}}},
        {"model": {"type": "BPE", "vocab": 5}},
        {"model": None},
        [],
    ]
    odd.append({"normalizer": {"type": "New"}, "model": {"type": "BPE", "vocab": {"a": 0}, "unk_token": "a"}})
    for config in odd:
        tokenizer: Any = Odd(config)
        assert longest_token(tokenizer) is None, config


async def test_a_prompt_that_cannot_fit_is_refused_unencoded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = longest_token(Tokenizer.from_file(str(TINY / "tokenizer.json")))
    assert longest is not None

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(rig.tokenizer, "encode", encode)
    long = "a" * (4096 * longest)
    for path, body, field in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": ["x", long]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        status, answer, _ = await rig.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == field
        assert (
            "maximum context length is 4096 tokens; the prompt has at least 4" in answer["error"]["message"]
        )


async def test_the_texts_of_a_request_count_together(tokenizer: own.Tokenizer) -> None:
    """64 short prompts are one job, not 64 small pieces of work on the event loop."""
    workers = InProcess(TextWork(tokenizer, ChatTemplate(TINY)))
    service = TextService(workers, tokenizer, UnknownFields(Log("test")))
    await service.encode(["a" * 1000] * 2, False, PromptLength(4096), ["prompt[0]", "prompt[1]"])
    assert not workers.jobs
    names = [f"prompt[{index}]" for index in range(64)]
    encoded = await service.encode(["a" * 1000] * 64, False, PromptLength(4096), names)
    assert list(map(list, encoded)) == [tokenizer.encode("a" * 1000, False)] * 64
    assert len(workers.jobs) == 1
    with pytest.raises(ContextTooLong):
        check_length(4096, 4096, "prompt")
