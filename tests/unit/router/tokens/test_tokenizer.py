"""Encoding and decoding, as a whole and token by token, for every kind of tokenizer."""

from __future__ import annotations

import codecs
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from common.errors import ModelError
from router.tokens.detokenizer import MAX_HELD, ByteDecoder, IncrementalDecoder, WindowDecoder
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.conftest import TINY
from tests.unit.router.tokens.vocabularies import CORPUS, KINDS, save


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {kind: Tokenizer(save(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}
    return made | {"tiny": Tokenizer(TINY)}


def said(decoder: IncrementalDecoder, ids: list[int]) -> str:
    return "".join(decoder.step(each) for each in ids) + decoder.flush()


def known(token: int | None) -> int:
    assert token is not None, "not in the vocabulary"
    return token


def test_which_decoder(all_kinds: dict[str, Tokenizer]) -> None:
    for kind, text in all_kinds.items():
        expected = ByteDecoder if kind in ("byte_level", "tiny") else WindowDecoder
        assert isinstance(text.stream(True), expected), kind


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans(), kind=st.sampled_from(["byte_level", "tiny"]))
def test_byte_level_is_exact_for_any_tokens(
    all_kinds: dict[str, Tokenizer], data: st.DataObject, skip: bool, kind: str
) -> None:
    text = all_kinds[kind]
    ids = data.draw(st.lists(st.integers(0, text.vocab_size + 3), max_size=30))
    assert said(text.stream(skip), ids) == text.decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*"the answr12ENDé€漢😀.", " ", "  ", " the", "\n"]), max_size=30),
    at=st.integers(0, 40),
    skip=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_answer_is_what_decoding_adds_to_the_prompt(
    all_kinds: dict[str, Tokenizer], pieces: list[str], at: int, skip: bool, kind: str
) -> None:
    """This includes spaces at the border between prompt and answer, wherever it falls between characters."""
    text = all_kinds[kind]
    ids = text.encode("".join(pieces), kind == "llama2")
    prompt, answer = ids[:at], ids[at:]
    before, whole = text.decode(prompt, skip), text.decode(ids, skip)
    if before.endswith("\ufffd") or not whole.startswith(before):
        return  # the border falls into a character: see below
    assert said(text.stream(skip, prompt), answer) == whole[len(before) :]


def test_leading_space_of_the_first_token(all_kinds: dict[str, Tokenizer]) -> None:
    text = all_kinds["llama2"]
    the = text.token_to_id("▁the")
    prompt = text.encode("answer", True)
    assert the is not None
    assert said(text.stream(True, prompt), [the]) == " the"
    # A special token in between does not hide the space.
    assert said(text.stream(True, [*prompt, 2]), [the]) == " the"
    assert said(text.stream(True, [1]), [the]) == "the"  # only special tokens before it
    assert text.stream(True, prompt).step(the) == " the"  # at once, not with the second token


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "tiny"])
def test_character_that_the_prompt_began(all_kinds: dict[str, Tokenizer], kind: str) -> None:
    text = all_kinds[kind]
    names = {"llama2": "<0x{:02X}>"}
    alphabet = {0xE2: "â", 0x82: "Ĥ", 0xAC: "¬"}
    ids = [
        known(text.token_to_id(names[kind].format(byte) if kind in names else alphabet[byte]))
        for byte in "€".encode()
    ]
    assert said(text.stream(True, ids[:2]), ids[2:]) == "€"
    assert said(text.stream(True, ids[:1]), ids[1:]) == "€"
    assert said(text.stream(True), ids[:2]) in ("\ufffd", "\ufffd\ufffd")
    whole = text.encode("\ufffd", False)  # not an incomplete character, though it looks like one
    assert said(text.stream(True, whole), ids) == "€"


# Bytes of "’", "😀" and "é", ASCII, and one that no character has, as byte-level vocabularies name them.
BYTES = {
    0xE2: "â",
    0x80: "Ģ",
    0x99: "Ļ",
    0xF0: "ð",
    0x9F: "Ł",
    0x98: "ĺ",
    0xC3: "Ã",
    0xA9: "©",
    0x41: "A",
    0xFF: "ÿ",
}


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.sampled_from(sorted(BYTES)), max_size=4),
    answer=st.lists(st.sampled_from(sorted(BYTES))),
)
@example(prompt=[0xE2, 0x80], answer=[0x99])
def test_byte_level_is_exact_after_any_prompt(
    all_kinds: dict[str, Tokenizer], prompt: list[int], answer: list[int]
) -> None:
    """The answer begins with the prompt's incomplete character only if its first byte continues that."""
    text = all_kinds["byte_level"]
    ids = [known(text.token_to_id(BYTES[byte])) for byte in [*prompt, *answer]]
    begun = codecs.getincrementaldecoder("utf-8")("replace")
    begun.decode(bytes(prompt))
    opened = begun.getstate()[0]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(opened + bytes(answer[:1]))
    except UnicodeDecodeError:
        opened = b""
    expected = (opened + bytes(answer)).decode(errors="replace") if answer else ""
    assert said(text.stream(True, ids[: len(prompt)]), ids[len(prompt) :]) == expected


def test_a_character_of_the_prompt_hides_no_later_invalid_byte(all_kinds: dict[str, Tokenizer]) -> None:
    text = all_kinds["llama2"]
    first, second, third, bad = (known(text.token_to_id(f"<0x{byte:02X}>")) for byte in (*"’".encode(), 0xFF))
    word = known(text.token_to_id("▁the"))
    for begun in ([second, third], [word], [bad, word]):
        answer = said(text.stream(True, [word, first]), [*begun, bad, word])
        assert answer.count("\ufffd") == 1 + begun.count(bad), begun
        assert answer.endswith("\ufffd the"), begun


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "tiny"])
def test_a_character_that_only_the_prompt_has_broken_is_not_in_the_answer(
    all_kinds: dict[str, Tokenizer], kind: str
) -> None:
    """An answer that does not complete it starts with what was generated, not with the prompt's U+FFFD."""
    text = all_kinds[kind]
    alphabet = {0xC3: "Ã", 0xA9: "©", 0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0xE2: "â", 0x82: "Ĥ"}

    def tokens(*values: int) -> list[int]:
        names = [f"<0x{each:02X}>" if kind == "llama2" else alphabet[each] for each in values]
        return [token for token in map(text.token_to_id, names) if token is not None]

    words = text.encode("ab", False)
    word = "ab" if kind != "llama2" else " ab"
    for prompt in (tokens(0xE2), tokens(0xE2, 0x82), tokens(0xF0, 0x9F, 0x98), tokens(0xC3, 0xA9, 0xE2)):
        assert prompt
        assert said(text.stream(True, prompt), words).strip() == "ab"
        assert said(text.stream(True, [*words, *prompt]), words) == word
        assert said(text.stream(True, prompt), []) == ""
    # Invalid bytes of the answer itself are shown.
    assert said(text.stream(True, tokens(0xE2)), [*tokens(0x82), *words]).count("\ufffd") == 1
    assert said(text.stream(True, tokens(0xE2)), tokens(0x82)).count("\ufffd") == 1
    assert said(text.stream(True, tokens(0xE2)), [*tokens(0xF0), *words]).count("\ufffd") == 1


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "tiny"])
def test_a_replacement_character_that_the_prompt_began(all_kinds: dict[str, Tokenizer], kind: str) -> None:
    """U+FFFD is a character as well: an answer that completes it contains it."""
    text = all_kinds[kind]
    names = ("<0xEF>", "<0xBF>", "<0xBD>") if kind == "llama2" else ("ï", "¿", "½")
    ids = [known(text.token_to_id(name)) for name in names]
    words = text.encode("ab", False)
    for cut in (1, 2):
        assert said(text.stream(True, ids[:cut]), ids[cut:]) == "\ufffd"
        assert said(text.stream(True, ids[:cut]), [*ids[cut:], *words]).startswith("\ufffd")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_half_characters_are_never_given_out(all_kinds: dict[str, Tokenizer], kind: str) -> None:
    text = all_kinds[kind]
    whole = "é€漢😀 the answer" if kind != "words" else "the answer"
    ids = text.encode(whole, False)
    decoder = text.stream(True)
    assert not any("\ufffd" in decoder.step(each) for each in ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "tiny"])
def test_invalid_bytes_are_emitted_at_constant_cost(all_kinds: dict[str, Tokenizer], kind: str) -> None:
    """A model that emits invalid UTF-8 for ever neither silences its stream nor slows it down."""
    text = all_kinds[kind]
    bad = text.token_to_id("<0xFF>" if kind == "llama2" else "ÿ")
    assert bad is not None
    decoder = text.stream(True)
    silent = longest = 0
    start = time.thread_time()
    for _ in range(20_000):
        silent = 0 if decoder.step(bad) else silent + 1
        longest = max(longest, silent)
    assert longest <= MAX_HELD
    assert time.thread_time() - start < 40  # quadratic would take minutes


def test_unknown_ids_have_no_text(all_kinds: dict[str, Tokenizer]) -> None:
    for kind, text in all_kinds.items():
        decoder = text.stream(True)
        assert "".join(decoder.step(text.vocab_size + 5) for _ in range(50)) + decoder.flush() == "", kind


def test_token_bytes(all_kinds: dict[str, Tokenizer]) -> None:
    text = all_kinds["byte_level"]
    ids = text.encode("漢€ END", False)
    assert b"".join(text.token_bytes(each) for each in ids).decode() == "漢€ END"
    for kind, each in all_kinds.items():
        for token in range(each.vocab_size):
            shown = each.token_text(token)
            if "\ufffd" not in shown:
                assert each.token_bytes(token) == shown.encode(), (kind, token)


def test_special_tokens(all_kinds: dict[str, Tokenizer]) -> None:
    text = all_kinds["llama2"]
    assert text.encode("a", True)[0] == 1
    assert 1 not in text.encode("a", False)
    assert text.encode("", True) == [1]
    assert text.encode("", False) == []


def test_lone_surrogates_become_replacement_characters(all_kinds: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "tiny"):
        for raw, clean in (
            ("a\ud800b", "a\ufffdb"),
            ("\udc00", "\ufffd"),
            ("x" * 5000 + "\ud83d", "x" * 5000 + "\ufffd"),
        ):
            ids = all_kinds[kind].encode(raw, False)
            assert all_kinds[kind].decode(ids, False) == clean
    ids = all_kinds["byte_level"].encode("a\0b", False)
    assert all_kinds["byte_level"].decode(ids, False) == "a\0b"


def test_long_and_short_texts_encode_alike(all_kinds: dict[str, Tokenizer]) -> None:
    for kind, text in all_kinds.items():
        sample = " ".join(CORPUS)
        parts = text.encode(sample, False)
        longer = (sample + " ") * 20
        assert text.encode(longer, False)[: len(parts) - 4] == parts[:-4], kind


def test_lengths_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    made = HfTokenizer.from_file(str(TINY / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    whole = Tokenizer(TINY).encode("one two three four five six", True)
    assert Tokenizer(tmp_path).encode("one two three four five six", True) == whole


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    for content in ("", "{}", "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match="cannot be read"):
            Tokenizer(tmp_path)
