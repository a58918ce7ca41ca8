"""The tokens of an answer's text are found among those of its reasoning, calls and markers, each once."""

from __future__ import annotations

import random

import msgspec
import pytest

from common.messages.generation import OutputToken, TokenLogprob
from router.answers.assistant_format import AssistantFormat, Shown
from router.answers.openai_responses import AnswerPiece
from router.apis import text_tokens
from router.apis.answer_items import Added, AnswerItems, ItemKind
from router.apis.text_tokens import TextTokens
from router.chat.answer_events import Span
from tests.unit.router.chat.wire_formats import parser_of, template_of


class Answer:
    """An answer whose tokens are named by their texts."""

    def __init__(self) -> None:
        self.found = TextTokens()
        self.written: list[str] = []

    def add(self, *tokens: str, shown: str | None = None) -> None:
        """Add a piece of these tokens. `shown`: its text, if a stop string may cut some."""
        offsets, ids = [], []
        for token in tokens:
            offsets.append(sum(map(len, self.written)))
            ids.append(OutputToken(len(self.written)))
            self.written.append(token)
        self.found.add(AnswerPiece(0, "".join(tokens) if shown is None else shown, ids, offsets, None))

    def of(self, *spans: Span) -> list[str]:
        return [self.written[token.id] for token in self.found.of(spans)]


def test_plain_text_has_all_tokens_that_show_something() -> None:
    answer = Answer()
    answer.add("He", "llo")
    assert answer.of((0, 5)) == ["He", "llo"]
    # A character of several tokens, of which only the last one brings text.
    answer.add("", "")
    answer.add("é")
    assert answer.of((5, 6)) == ["", "", "é"]
    # A stop token brings none.
    answer.add("!", "")
    assert answer.of((6, 7)) == ["!"]


def test_markers_and_reasoning_are_left_out() -> None:
    answer = Answer()
    answer.add("<think>", "The", " end", "</think>", "The", " end", " is", " <")
    assert answer.of((22, 32)) == ["The", " end", " is"]
    # Text that may become a marker is told later, with the blank before it.
    answer.add("b", ">")
    assert answer.of((32, 36)) == [" <", "b", ">"]


def test_a_token_belongs_to_the_first_text_that_it_shows_some_of() -> None:
    answer = Answer()
    answer.add("a b", "c</tool>d", "e")
    assert answer.of((0, 2)) == ["a b"]
    assert answer.of((2, 4)) == ["c</tool>d"]
    assert answer.of((11, 13)) == ["e"]
    # also if it is the last one that is known
    answer.add("<tool>fg", shown="<tool>f")
    assert answer.of((19, 20)) == ["<tool>fg"]


def test_a_text_whose_blanks_are_on_both_sides_of_a_marker() -> None:
    answer = Answer()
    answer.add("Yes", "\n", "<tool>", "x", "\n", "No")
    assert answer.of((0, 3)) == ["Yes"]
    assert answer.of((3, 4), (11, 14)) == ["\n", "\n", "No"]


def test_hidden_text_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may have a hundred thousand tokens of reasoning that the client does not get."""
    monkeypatch.setattr(text_tokens, "KEPT", 8)
    answer = Answer()
    answer.add("early", *["x"] * 16)
    answer.add("Yes", "!")
    assert answer.of((0, 25)) == ["x"] * 5 + ["Yes", "!"]


def test_tokens_arrive_before_text_that_a_stop_string_may_cut() -> None:
    answer = Answer()
    answer.add("a", "b", shown="a")
    assert answer.of((0, 1)) == ["a"]
    answer.add("c", shown="bc")
    assert answer.of((1, 3)) == ["b", "c"]


class Named:
    """Names tokens by their number."""

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return b""


SHOWN = ("a <b c <", "d<e", "f<tool_call>g</tool_call>a{b}c")
HIDDEN = ("<think>a <b</think>", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>', "")
MIXED = "".join(text for pair in zip(SHOWN, HIDDEN) for text in pair)


def shown_places() -> list[int]:
    """Return where the letters of SHOWN are in MIXED."""
    places, at = list[int](), 0
    for text, hidden in zip(SHOWN, HIDDEN):
        places += range(at, at + len(text))
        at += len(text) + len(hidden)
    return places


def divided(drawn: random.Random) -> tuple[list[str], list[int]]:
    """Return tokens of MIXED and their offsets."""
    tokens, offsets, at = list[str](), list[int](), 0
    while at < len(MIXED):
        offsets.append(at)
        tokens.append(MIXED[at : at + drawn.choice((0, 1, 1, 2, 3, 5, 9, 40))])
        at += len(tokens[-1])
    return tokens, offsets


@pytest.mark.parametrize("seed", range(50))
def test_each_token_of_a_text_is_listed_once_with_the_first_letter_that_it_shows(seed: int) -> None:
    """Whatever the tokens are, in whatever pieces they arrive."""
    drawn = random.Random(seed)
    tokens, offsets = divided(drawn)
    parser = parser_of(template_of("qwen3"))
    items = AnswerItems(
        AssistantFormat(("", "", 0, Named(), 0, ()), [parser], Shown(("reasoning_content",), True))
    )
    places, left = shown_places(), list(range(len(tokens)))
    start, seen = 0, 0
    while start < len(tokens):
        end = min(start + drawn.randint(1, 8), len(tokens))
        known = [OutputToken(number, TokenLogprob(-1.0, (), ())) for number in range(start, end)]
        ended = "stop" if end == len(tokens) else None
        for change in items.follow(
            AnswerPiece(0, "".join(tokens[start:end]), known, offsets[start:end], ended)
        ):
            if not isinstance(change, Added) or change.item.kind is not ItemKind.TEXT:
                continue
            now = places[seen : seen + len(change.text)]
            assert "".join(MIXED[place] for place in now) == change.text
            own = [
                number
                for number in left
                if any(
                    offsets[number] <= place < offsets[number] + max(len(tokens[number]), 1) for place in now
                )
            ]
            assert [int(msgspec.json.decode(each)["token"]) for each in change.logprobs] == own
            left = [number for number in left if number not in own]
            seen += len(change.text)
        start = end
    assert seen == len(places)
