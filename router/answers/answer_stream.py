"""Streams an answer to its client, and collects one that is not streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from common.errors import ClientGone, RequestError
from common.observability.logs import Log
from router.answers.answer_form import AnswerForm, Collector
from router.answers.answer_reader import AnswerReader
from router.answers.choices import Choice
from router.answers.openai_responses import AnswerPiece, Usage, usage_field
from router.dispatch.generation import Generator
from router.http.errors import body_of, defect, request_id_key
from router.http.json_answer import send_json
from router.http.sse import EVENT_END, SseWriter
from router.requests.openai_schema import SharedFields


class _Collected:
    """A complete answer as a PieceSink. It never makes a piece wait."""

    def __init__(self, collector: Collector) -> None:
        self.add = collector.add

    def ready(self) -> bool:
        return True


class _Streamed:
    """A stream of events as a PieceSink. It takes pieces once it has started, while the client keeps up."""

    def __init__(
        self, form: AnswerForm, writer: SseWriter, body: SharedFields, choices: Sequence[Choice]
    ) -> None:
        options = body.stream_options
        self._form = form
        self._choices = choices
        self._cached = [0] * len(choices)
        self._every = bool(options and options.continuous_usage_stats)
        self.at_end = bool(options and options.include_usage)
        self._constant = b',"usage":null' if self.at_end else b""
        self.ready = writer.has_room
        # A step brings at most one run for each choice.
        self._write = writer.write_now if len(choices) == 1 else writer.write_soon

    def opening(self) -> bytes:
        """Return the events before the first token."""
        first = self._choices[0].request
        usage = usage_field(Usage(len(first.token_ids))) if self._every else self._constant
        return self._form.opening(len(self._choices), usage)

    def events(self, piece: AnswerPiece) -> bytes:
        return self._form.events(piece, self._counts(piece) if self._every else self._constant)

    def add(self, piece: AnswerPiece) -> None:
        # Without a call of `events`: this runs for every token.
        usage = self._counts(piece) if self._every else self._constant
        self._write(self._form.events(piece, usage))

    def _counts(self, piece: AnswerPiece) -> bytes:
        """Return the usage member of an event of one choice, which counts that choice alone, as in vLLM."""
        if piece.cached_tokens is not None:
            self._cached[piece.index] = piece.cached_tokens
        prompt = self._choices[piece.index].request.token_ids
        return usage_field(Usage(len(prompt), piece.completion_tokens, self._cached[piece.index]))


class Answering:
    """Answers requests whose choices are ready to be generated."""

    def __init__(self, generator: Generator, log: Log) -> None:
        self._generator = generator
        self._log = log

    async def collect(
        self, request: web.Request, form: AnswerForm, choices: Sequence[Choice], usage: Usage
    ) -> web.StreamResponse:
        """Answer with one JSON object."""
        whole = form.collector(len(choices))
        reader = AnswerReader(self._generator, choices, usage, _Collected(whole))
        pieces = reader.pieces()
        try:
            async for piece in pieces:
                whole.add(piece)
        finally:
            await pieces.aclose()
        return await send_json(request, await whole.parts(usage))

    async def stream(
        self,
        request: web.Request,
        body: SharedFields,
        form: AnswerForm,
        choices: Sequence[Choice],
        usage: Usage,
    ) -> web.StreamResponse:
        """Answer with server-sent events. An error before the first token is an ordinary HTTP error."""
        writer = SseWriter(request)
        sink = _Streamed(form, writer, body, choices)
        last = b""
        reader = AnswerReader(self._generator, choices, usage, sink)
        try:
            pieces = reader.pieces()
            try:
                async for piece in pieces:
                    events = sink.events(piece)
                    if writer.started:
                        await writer.send(events)
                    else:
                        await writer.start(sink.opening() + events)
                for part in form.ending(usage, sink.at_end):
                    ready, last = last, part
                    if ready:
                        await writer.send(ready)
                        await asyncio.sleep(0)
                return await writer.finish(last)
            except ClientGone:
                raise
            except Exception as error:
                if not writer.started:
                    raise
                known = error if isinstance(error, RequestError) else defect(self._log, request)
                # The last part may be the middle of an event; the error is an event of its own.
                open_event = last and not last.endswith(EVENT_END)
                ended = last + EVENT_END * bool(open_event)
                return await writer.finish(ended + form.failure(body_of(known), known.status))
            finally:
                await pieces.aclose()
        except ClientGone as error:
            self._log.info(str(error), request_id=request[request_id_key])
            return writer.abandon()
