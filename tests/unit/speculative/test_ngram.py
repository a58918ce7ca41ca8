"""Suffix matching: the longest earlier occurrence wins, the shared table fills up, and nothing grows without bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from decode_node.request import DecodeRequest
from decode_node.speculative import ngram_texts
from decode_node.speculative.ngram_texts import NgramTexts, SharedTable, TextIndex

PEER = NodeRef(name="prefill-0", role="prefill", incarnation="0" * 32)


def request(room: int, prompt: list[int], output: list[int]) -> DecodeRequest:
    return DecodeRequest(
        room=room,
        request_id=f"r{room}",
        prompt=prompt,
        emitted=0,
        sampling=SamplingParams(max_tokens=99),
        prefill=PEER,
        received=0.0,
        deadline=1.0,
        output=output,
    )


def drafts(texts: NgramTexts, width: int, *requests: DecodeRequest) -> list[list[int]]:
    return [list(found) for found in texts.propose(requests, width)]


def test_the_longest_agreement_wins_then_the_latest() -> None:
    index = TextIndex()
    index.extend([7, 1, 2, 3, 9, 1, 2, 4, 5, 7, 1, 2])
    assert index.continuation(3) == [3, 9, 1]
    index.extend([8, 6, 1, 2])
    assert index.continuation(2) == [8, 6]
    assert TextIndex().continuation(4) == []


def test_an_agreement_that_is_one_token_longer_wins() -> None:
    index = TextIndex()
    index.extend([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 9, 3, 4, 70, 1, 2, 3, 4])
    assert index.continuation(1) == [50]


def test_a_text_too_short_or_new_gives_nothing() -> None:
    made = NgramTexts(max_texts=4)
    assert drafts(made, 3, request(1, [5], [6]), request(2, [1, 2, 3], [4])) == [[], []]


def test_the_index_follows_the_output_whatever_is_dropped_between() -> None:
    made, fresh = NgramTexts(max_texts=2), NgramTexts(max_texts=2)
    long = request(1, [1, 2, 3, 4, 1], [2])
    assert drafts(made, 3, long) == [[3, 4, 1]]
    for room in range(2, 8):
        drafts(made, 3, request(room, [room] * 3, [room]))
        assert made.texts <= 2
    long.output += [3, 4, 5, 2, 3]
    assert drafts(made, 3, long) == drafts(fresh, 3, long) == [[4, 5, 2]]


def test_the_least_recently_used_index_is_dropped_and_answers_are_learned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[TextIndex]()
    learned = list[tuple[int, int]]()

    class CountedIndex(TextIndex):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    class Table(SharedTable):
        def learn(self, text: Sequence[int], start: int) -> None:
            learned.append((start, len(text)))

    monkeypatch.setattr(ngram_texts, "TextIndex", CountedIndex)
    texts = NgramTexts(max_texts=2, shared=Table())
    requests = {room: request(room, [room] * 3, [room]) for room in (1, 2, 3)}
    indexes = []
    for room in (1, 2, 1, 3, 1, 2):
        requests[room].output += [room]
        texts.propose([requests[room]], 2)
        indexes.append(len(made))
    assert indexes == [1, 2, 2, 3, 3, 4], "that of 2 was dropped for 3"
    assert learned == [(3, 5), (3, 5), (5, 6), (3, 5), (6, 7), (3, 6)], (
        "all of an answer again for a new index"
    )
    assert texts.texts == 2


def test_answers_are_shared_and_prompts_are_not() -> None:
    made = NgramTexts(max_texts=4)
    drafts(made, 2, request(1, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]))
    assert drafts(made, 2, request(2, [99, 20, 21], [22])) == [[23, 24]]
    assert drafts(made, 2, request(3, [98, 10, 11], [12])) == [[]]


def test_the_shared_table_is_bounded() -> None:
    table = SharedTable(max_entries=5)
    table.learn(list(range(50)), 0)
    assert len(table) == 5
    assert table.continuation([46, 47, 48], 4) == [49]
    assert table.continuation([1, 2, 3], 4) == []
