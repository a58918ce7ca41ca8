"""Stop strings across token boundaries and inside characters, against a reference on the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.messages.generation import OutputToken
from router.tokens.text_stream import TextStream
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.tokens.vocabularies import KINDS, save


class Spelled:
    """A decoder whose tokens have given texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def step(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


def reference(text: str, stops: list[str], include: bool, first: int = 0) -> tuple[str, int | None]:
    """Return (text that comes out, length of text at which this is decided). The stop string that ends first after
    `first` characters wins, and the longest of those that end at the same place."""
    for end in range(first + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - max(map(len, ended))], end
    return text, None


LETTERS = st.text("ab€", min_size=1, max_size=3)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)


@settings(max_examples=250, deadline=None)
@given(
    texts=st.lists(LETTERS, min_size=1, max_size=12),
    stops=STOPS,
    include=st.booleans(),
    least=st.just(0) | st.integers(0, 12),
    data=st.data(),
)
@example(texts=["abcd"], stops=["abcd", "bc"], include=False, least=0, data=None)
@example(texts=["ab", "ab", "ab", "c"], stops=["abab", "abc"], include=False, least=2, data=None)
def test_any_split_gives_the_reference(
    texts: list[str], stops: list[str], include: bool, least: int, data: st.DataObject | None
) -> None:
    stream = TextStream(Spelled(texts), stops, include, least)
    ids = list(range(len(texts)))
    out, counted, offsets, shown = "", 0, [], []
    while ids and stream.finish_reason is None:
        take = data.draw(st.integers(1, len(ids))) if data else 1
        batch, ids = [OutputToken(each) for each in ids[:take]], ids[take:]
        text, tokens = stream.push(batch, None if ids else "length")
        out += text
        counted += len(tokens)
        offsets += stream.offsets
        shown += [token.id for token in tokens]
        so_far = "".join(texts[: len(texts) - len(ids)])
        if stream.finish_reason is None:  # only what could become a stop string is held back
            held = so_far[len(out) :]
            assert so_far.startswith(out)
            assert not held or any(stop.startswith(held) for stop in stops)
    whole = "".join(texts)
    expected, end = reference(whole, stops, include, len("".join(texts[:least])))
    assert out == expected
    assert stream.finish_reason == ("length" if end is None else "stop")
    if end is not None and not include and not least:
        assert not any(stop in out for stop in stops)
    completing = next(n for n in range(1, len(texts) + 1) if len("".join(texts[:n])) >= (end or len(whole)))
    assert counted == stream.completion_tokens == len(offsets) == completing
    assert shown == list(range(completing))
    assert offsets == [len("".join(texts[:n])) for n in range(completing)]


@pytest.fixture(scope="module", params=["byte_level", "llama2"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    assert request.param in KINDS
    return Tokenizer(save(request.param, tmp_path_factory.mktemp("vocabulary")))


@settings(max_examples=120, deadline=None)
@given(
    text=st.text("eND é€漢😀", min_size=1, max_size=20),
    stops=st.lists(st.text("eND é€漢😀", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    size=st.integers(1, 5),
)
async def test_real_tokens_and_characters_of_several_tokens(
    kind: Tokenizer, text: str, stops: list[str], include: bool, size: int
) -> None:
    ids = kind.encode(text, False)
    stream = TextStream(kind.stream(True), stops, include)
    out = ""
    for at in range(0, len(ids), size):
        batch = [OutputToken(each) for each in ids[at : at + size]]
        out += stream.push(batch, "length" if at + size >= len(ids) else None)[0]
        if stream.finish_reason:
            break
    assert out == reference(kind.decode(ids, True), stops, include)[0]


def test_held_text_comes_out_at_the_end() -> None:
    stream = TextStream(Spelled(["abc", "E", "N"]), ["END"], False)
    assert stream.push([OutputToken(0)], None)[0] == "abc"
    assert stream.push([OutputToken(1)], None)[0] == ""
    assert stream.push([OutputToken(2)], "length")[0] == "EN"
    stream = TextStream(Spelled(["abc", "E"]), ["END"], False)
    stream.push([OutputToken(0), OutputToken(1)], None)
    assert stream.push([], "length") == ("E", [])  # only the reason


def test_a_stop_token_has_no_text_and_counts() -> None:
    for include, text in ((False, "abc"), (True, "abc.")):
        stream = TextStream(Spelled(["abc", "."]), [], include)
        out, tokens = stream.push([OutputToken(0), OutputToken(1)], "stop")
        assert (out, len(tokens), stream.completion_tokens, stream.offsets) == (text, 2, 2, [0, 3])
        assert stream.finish_reason == "stop"
    stream = TextStream(Spelled(["abc", "."]), [], False)
    assert stream.push([OutputToken(0), OutputToken(1)], "length")[0] == "abc."


def test_a_stop_string_wins_over_length() -> None:
    stream = TextStream(Spelled(["xEND"]), ["END"], False)
    assert stream.push([OutputToken(0)], "length")[0] == "x"
    assert stream.finish_reason == "stop"


def test_hostile_stops_cost_linear_time() -> None:
    """Sixteen long stop strings almost match everywhere."""
    stops = ["a" * (256 - i) + "b" for i in range(16)]
    stream = TextStream(Spelled(["aaaa"]), stops, False)
    start = time.thread_time()
    for _ in range(1000):
        stream.push([OutputToken(0)], None)
    # CPU time of this thread; a quadratic algorithm would take minutes.
    assert time.thread_time() - start < 40
