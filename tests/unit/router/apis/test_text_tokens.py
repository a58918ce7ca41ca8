"""The tokens of an answer's text are found among those of its reasoning, calls and markers."""

from __future__ import annotations

import pytest

from common.messages.generation import OutputToken
from router.answers.openai_responses import AnswerPiece
from router.apis import text_tokens
from router.apis.text_tokens import TextTokens


class Answer:
    """An answer whose tokens are named by their texts."""

    def __init__(self) -> None:
        self.found = TextTokens()
        self.written: list[str] = []

    def of(
        self, tokens: list[str], parts: list[str], shown: str | None = None, held: int = 0
    ) -> list[list[str]]:
        """Add a piece of these tokens; return those of the parts.

        `shown`: its text, if a stop string may cut some; `held`: characters at its end that a parser holds back.
        """
        offsets, ids = [], []
        for token in tokens:
            offsets.append(sum(map(len, self.written)))
            ids.append(OutputToken(len(self.written)))
            self.written.append(token)
        text = "".join(tokens) if shown is None else shown
        self.found.add(AnswerPiece(0, text, ids, offsets, None))
        return [[self.written[token.id] for token in each] for each in self.found.of(parts, held)]


def test_plain_text_has_all_tokens_that_show_something() -> None:
    answer = Answer()
    assert answer.of(["He", "llo"], ["Hello"]) == [["He", "llo"]]
    # A character of several tokens, of which only the last one brings text.
    assert answer.of(["", ""], []) == []
    assert answer.of(["é"], ["é"]) == [["", "", "é"]]
    # A stop token brings none.
    assert answer.of(["!", ""], ["!"]) == [["!"]]


def test_markers_and_reasoning_are_left_out() -> None:
    answer = Answer()
    assert answer.of(["<think>", "The", " end"], ["The end"]) == [["The", " end"]]
    written = ["!", "</think>", "\n\n", "The", " end"]
    assert answer.of(written, ["!", "The end"]) == [["!"], ["The", " end"]]
    # Text that may become a marker is told later.
    assert answer.of([" is", " <"], [" is"]) == [[" is"]]
    assert answer.of(["b", ">"], [" <b>"]) == [[" <", "b", ">"]]


def test_text_after_hidden_reasoning_is_not_taken_for_it() -> None:
    answer = Answer()
    assert answer.of(["<think>", "Yes", "."], []) == []
    assert answer.of(["</think>", "Yes"], ["Yes"]) == [["Yes"]]
    assert answer.of(["."], ["."]) == [["."]]


def test_text_that_is_held_back_is_not_taken_for_a_part() -> None:
    answer = Answer()
    assert answer.of(["<", "<"], ["<"], held=1) == [["<"]]
    assert answer.of(["<"], ["<"], held=1) == [["<"]]
    assert answer.of(["a"], ["<a"]) == [["<", "a"]]


def test_tokens_that_lie_on_both_sides_of_a_marker_belong_to_the_text() -> None:
    answer = Answer()
    assert answer.of([">\n", "Yes<", "tool>"], ["Yes"]) == [["Yes<"]]
    assert answer.of(["x</tool>", " No"], [" No"]) == [[" No"]]


def test_blanks_from_the_other_side_of_a_marker() -> None:
    answer = Answer()
    assert answer.of(["Yes", "\n", "<tool>"], ["Yes"]) == [["Yes"]]
    assert answer.of(["x", "</tool>", "No"], ["\nNo"]) == [["No"]]
    assert answer.of(["<tool>"], ["  "]) == [[]]


def test_hidden_text_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may have a hundred thousand tokens of reasoning that the client does not get."""
    monkeypatch.setattr(text_tokens, "KEPT", 8)
    answer = Answer()
    assert answer.of(["early", *["x"] * 16], []) == []
    assert answer.of(["Yes", "!"], ["early", "Yes!"]) == [[], ["Yes", "!"]]


def test_tokens_arrive_before_text_that_a_stop_string_may_cut() -> None:
    answer = Answer()
    assert answer.of(["a", "b"], ["a"], shown="a") == [["a"]]
    assert answer.of(["c"], ["bc"], shown="bc") == [["b", "c"]]
