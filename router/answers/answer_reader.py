"""Reads the choices of one answer: tokens become pieces of text, in order within each choice.

Most tokens never wake the task that answers the request: the dispatcher gives them to `ChoiceReader.take_now` in the
turn in which they arrive, and the piece goes straight to the answer's sink. The task reads what decides something: the
first tokens, the last ones, a complete stop string, errors, and everything while the sink cannot take pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Protocol

from common.errors import InternalError
from common.messages.generation import OutputToken
from router.answers.choices import Choice
from router.answers.openai_responses import AnswerPiece, Usage
from router.answers.prompt_pieces import with_prompt
from router.dispatch.generation import AnswerComplete, Generator


class PieceSink(Protocol):
    """The destination of an answer's pieces: a stream to the client, or a complete answer."""

    def ready(self) -> bool:
        """Return whether `add` may be called now. False while something has to be awaited first."""
        ...

    def add(self, piece: AnswerPiece) -> None:
        """Take a piece without waiting. May raise RequestError."""
        ...


class ChoiceReader:
    """Reads one choice."""

    def __init__(self, index: int, choice: Choice, usage: Usage, sink: PieceSink) -> None:
        """`usage` counts the tokens of all choices."""
        self._index = index
        self._choice = choice
        self._usage = usage
        self._sink = sink
        # What became of tokens that `take_now` has read but that the task must deal with: a piece that completes a stop
        # string, or an error.
        self._result: AnswerPiece | Exception | None = None
        self.queued = 0  # pieces of this choice that the task has yet to pass on

    async def pieces(self, generator: Generator) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces that the sink has not got. Raises InternalError if the tokens end without a reason."""
        choice, text = self._choice, self._choice.text
        deltas = generator.generate(choice.request, self.take_now)
        try:
            async for delta in deltas:
                if delta.cached_tokens and choice.request.share.counted:
                    self._usage.cached_tokens += delta.cached_tokens
                piece = self._taken() or self._read(delta.tokens, delta.finish_reason)
                piece.cached_tokens, piece.prompt_logprobs = delta.cached_tokens, delta.prompt_logprobs
                piece.states = choice.request.states
                if text.finish_reason is not None:
                    piece.steps = choice.request.steps
                    piece.steps.end(text.completion_tokens)
                # A stop string may also end the text before the last token of the last delta.
                stopped = text.finish_reason != delta.finish_reason
                if stopped:
                    with suppress(AnswerComplete, StopAsyncIteration):
                        await deltas.athrow(AnswerComplete())  # frees the nodes
                yield piece
                if stopped:
                    return
        finally:
            await deltas.aclose()
        if text.finish_reason is None:
            raise InternalError("the token stream ended without a finish reason")

    def take_now(self, tokens: Sequence[OutputToken]) -> bool:
        """Pass tokens on to the sink. Return False if the task has to read them, or what became of them."""
        if self.queued or not self._sink.ready():
            return False
        try:
            piece = self._read(tokens, None)
            if piece.finish_reason is not None:
                self._result = piece
                return False
            self._sink.add(piece if self._choice.shown is None else self._choice.shown.after(piece))
        except Exception as error:
            self._result = error
            return False
        return True

    def _taken(self) -> AnswerPiece | None:
        """Return the piece that ends the text, if `take_now` has read it. Raises the error of `take_now`."""
        result, self._result = self._result, None
        if isinstance(result, Exception):
            raise result
        return result

    def _read(self, tokens: Sequence[OutputToken], finish_reason: str | None) -> AnswerPiece:
        text = self._choice.text
        before = text.completion_tokens
        new, counted = text.push(tokens, finish_reason)
        self._usage.completion_tokens += text.completion_tokens - before
        return AnswerPiece(
            self._index,
            new,
            counted,
            text.offsets,
            text.finish_reason,
            text.completion_tokens,
            stop_reason=text.stop_reason,
            matched_stop=text.matched_stop,
        )


class AnswerReader:
    """Reads all choices of an answer."""

    def __init__(
        self, generator: Generator, choices: Sequence[Choice], usage: Usage, sink: PieceSink
    ) -> None:
        self._generator = generator
        self._choices = choices
        self._readers = [ChoiceReader(index, each, usage, sink) for index, each in enumerate(choices)]

    def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces of all choices as they arrive. Closing it, or an error in one choice, ends all of them."""
        return self._shown(0) if len(self._choices) == 1 else self._merged()

    async def _merged(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of several choices, each read by a task of its own."""
        queue: asyncio.Queue[AnswerPiece | Exception | None] = asyncio.Queue(maxsize=4 * len(self._choices))
        tasks = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self._choices))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    self._choices[0].request.batch.failed = True
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
                    self._readers[item.index].queued -= 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, queue: asyncio.Queue[AnswerPiece | Exception | None]) -> None:
        """Put the pieces of one choice into the queue, then None or its error."""
        try:
            pieces = self._shown(index)
            try:
                async for piece in pieces:
                    self._readers[index].queued += 1
                    await queue.put(piece)
            finally:
                await pieces.aclose()
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    def _shown(self, index: int) -> AsyncGenerator[AnswerPiece, None]:
        pieces, shown = self._readers[index].pieces(self._generator), self._choices[index].shown
        return pieces if shown is None else with_prompt(pieces, shown)
