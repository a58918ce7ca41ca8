"""Complete answers are assembled from parts that were encoded as the tokens arrived."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.messages.generation import OutputToken, TokenLogprob
from router.answers.openai_responses import AnswerPiece, ChatFormat, CompletionFormat, Format, Usage
from router.answers.whole_answers import LARGE_TEXT, WholeAnswer, WholeChoice
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL


class CountingTokenizer(Tokenizer):
    """Counts the tokens whose text is requested."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked = 0

    def token_text(self, token_id: int) -> str:
        self.asked += 1
        return super().token_text(token_id)


@cache
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(MODEL)


def pieces(count: int, text: str = 'a"') -> list[AnswerPiece]:
    made = []
    for number in range(count):
        token = OutputToken(300 + number % 9, TokenLogprob(-0.5, (301, 302), (-0.25, float("-inf"))))
        last = number == count - 1
        made.append(AnswerPiece(0, text, [token, token], [number, number], "length" if last else None))
    return made


def form_of(chat: bool, logprobs: int | None) -> Format:
    kind = ChatFormat if chat else CompletionFormat
    return kind("an-id", "model", 7, tokenizer(), logprobs)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_it_holds_all_pieces_and_nothing_is_left_for_the_end(chat: bool, logprobs: int | None) -> None:
    form = form_of(chat, logprobs)
    whole = WholeAnswer(form, [WholeChoice(form, index) for index in range(2)])
    for index in range(2):
        for piece in pieces(3):
            whole.add(replace(piece, index=index))
    asked = tokenizer().asked
    body = b"".join(await whole.parts(Usage(2, 6, 1)))
    assert tokenizer().asked == asked
    answer = json.loads(body)
    assert list(answer) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["usage"]["total_tokens"] == 8
    for index, choice in enumerate(answer["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        found = choice["logprobs"]
        if chat:
            assert choice["message"] == {"role": "assistant", "content": 'a"' * 3, "refusal": None}
        else:
            assert choice["text"] == 'a"' * 3
        if logprobs is None:
            assert found is None
        elif chat:
            assert (len(found["content"]), found["refusal"]) == (6, None)
            assert all(len(entry["top_logprobs"]) == logprobs for entry in found["content"])
        else:
            assert found["text_offset"] == [0, 0, 1, 1, 2, 2]
            assert {len(column) for column in found.values()} == {6}
            assert found["token_logprobs"] == [-0.5] * 6


async def test_no_part_of_a_long_answer_is_large() -> None:
    form = form_of(True, 2)
    whole = WholeAnswer(form, [WholeChoice(form, 0)])
    for piece in pieces(2000, "x" * 10):
        whole.add(piece)
    assert max(map(len, await whole.parts(Usage()))) < LARGE_TEXT
