"""Pieces of an answer keep their order and their number, whether the task or the dispatcher's turn passes them on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from common.messages.generation import SamplingParams
from router.answers.answer_reader import AnswerReader
from router.answers.choices import Choice
from router.answers.openai_responses import AnswerPiece, Usage
from router.dispatch.generation import AnswerComplete, GenerationRequest, TakeNow, TokenDelta, take_nothing
from router.tokens.text_stream import TextStream
from tests.unit.router.scripted_generator import delta


class Letters:
    """Decodes token N as one letter."""

    def step(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def flush(self) -> str:
        return ""


def letters(count: int, start: int = 0) -> str:
    return "".join(Letters().step(each) for each in range(start, start + count))


@dataclass
class Sink:
    """Takes pieces while `willing` says so, or raises `error`."""

    willing: Callable[[], bool] = lambda: True
    error: Exception | None = None
    pieces: list[AnswerPiece] = field(default_factory=list)
    now: int = 0  # pieces that the task did not have to pass on

    def ready(self) -> bool:
        return self.willing()

    def add(self, piece: AnswerPiece) -> None:
        if self.error is not None:
            raise self.error
        self.now += 1
        self.pieces.append(piece)

    def text(self, index: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.index == index)


@dataclass
class Offering:
    """A generator of `runs` of token numbers that offers each of them to the reader once the first one was read."""

    runs: Sequence[int]
    pauses: Callable[[], bool] = lambda: False
    ended: list[str] = field(default_factory=list)

    async def generate(
        self, request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncGenerator[TokenDelta, None]:
        at = 0
        try:
            for number, count in enumerate(self.runs):
                made = delta(range(at, at + count), "length" if number == len(self.runs) - 1 else None)
                at += count
                if self.pauses():
                    await asyncio.sleep(0)
                if not number or made.finish_reason is not None or not take_now(made.tokens):
                    yield made
            self.ended.append("whole")
        except AnswerComplete:
            self.ended.append("stopped")


def choice(number: int = 0, stops: Sequence[str] = ()) -> Choice:
    text = TextStream(Letters(), stops, False)
    return Choice(GenerationRequest(f"r{number}", [1], SamplingParams(max_tokens=99)), text)


async def read(generator: Offering, choices: Sequence[Choice], sink: Sink) -> Usage:
    usage = Usage()
    async for piece in AnswerReader(generator, choices, usage, sink).pieces():
        sink.pieces.append(piece)
    return usage


@given(st.lists(st.integers(1, 3), min_size=2, max_size=12), st.integers(1, 3), st.integers(0, 2**32))
def test_every_token_arrives_once_and_in_order(runs: list[int], choices: int, seed: int) -> None:
    draw = random.Random(seed)
    sink = Sink(lambda: draw.random() < 0.7)
    generator = Offering(runs, lambda: draw.random() < 0.5)
    usage = asyncio.run(read(generator, [choice(each) for each in range(choices)], sink))
    for index in range(choices):
        assert sink.text(index) == letters(sum(runs))
        assert [piece.finish_reason for piece in sink.pieces if piece.index == index][-1] == "length"
    assert usage.completion_tokens == choices * sum(runs)


async def test_the_task_reads_the_first_and_the_last_tokens_only() -> None:
    sink = Sink()
    await read(Offering([1] * 50), [choice()], sink)
    assert (len(sink.pieces), sink.now) == (50, 48)


async def test_a_stop_string_that_is_completed_in_between_ends_the_answer() -> None:
    sink, generator = Sink(), Offering([1, 2, 2, 2, 2])
    usage = await read(generator, [choice(stops=("ef",))], sink)
    assert sink.text() == "abcd"
    assert (sink.pieces[-1].finish_reason, sink.pieces[-1].stop_reason) == ("stop", "ef")
    assert generator.ended == ["stopped"]
    assert usage.completion_tokens == 6, "tokens after the stop string do not count"


@pytest.mark.parametrize("stop", ["b", "ef", "ij"])
async def test_a_stop_string_in_any_delta_ends_the_steps_where_it_ends_the_text(stop: str) -> None:
    """The generator hears of it in the last delta, too: the answer stops and has not reached its greatest length."""
    asked, generator = choice(stops=(stop,)), Offering([1, 2, 3, 5])
    for start, tokens in ((1, 2), (3, 3), (6, 5)):
        asked.request.steps.add(start, tokens)
    usage = await read(generator, [asked], Sink())
    assert generator.ended == ["stopped"]
    count = {"b": 1, "ef": 2, "ij": 3}[stop]
    given = usage.completion_tokens - 1
    assert (asked.request.steps.count, asked.request.steps.accept_length) == (count, given / count)


@pytest.mark.parametrize("error", [InternalError("a pattern takes too long"), ZeroDivisionError("a defect")])
async def test_an_error_of_the_sink_reaches_the_task(error: Exception) -> None:
    with pytest.raises(type(error)):
        await read(Offering([1, 1, 1, 1]), [choice()], Sink(error=error))
